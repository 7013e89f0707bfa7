"""Answers to balise 4 of 23_inference: who runs in the next step, and a service on a simulated clock."""

from tests.answers.bank import Bank

bank = Bank("23_inference", 4, whole=True)

# first who goes back, then who comes in; the lists that were given are changed. A clock that looks at all requests
IN_PLACE = """
def need(request, size):
    return (request.prompt + request.done + size - 1) // size


def schedule(waiting, running, blocks, size, most):
    while running and (sum(need(one, size) for one in running) > blocks or len(running) > most):
        waiting.insert(0, running.pop())
    if waiting and need(waiting[0], size) > blocks:
        raise ValueError(waiting[0].number)
    used = sum(need(one, size) for one in running)
    while waiting and len(running) < most and used + need(waiting[0], size) <= blocks:
        running.append(waiting.pop(0))
        used += need(running[-1], size)
    return waiting, running


def serve(requests, plan, seconds):
    found, clock, running, waiting = {}, 0.0, [], []
    unseen = list(requests)
    while True:
        for one in sorted(unseen, key=lambda r: r.arrival):
            if one.arrival <= clock:
                waiting.append(one)
        unseen = [one for one in unseen if one.arrival > clock]
        if not running and not waiting:
            if not unseen:
                return found
            clock = min(one.arrival for one in unseen)
            continue
        there = {one.number for one in running}
        waiting, running = plan(waiting, running)
        tokens = 0
        for one in running:
            tokens += 1 if one.number in there else one.prompt + one.done
        clock = clock + seconds(tokens)
        for one in running:
            one.done = one.done + 1
            found.setdefault(one.number, []).append(clock)
        running = [one for one in running if one.done != one.output]
"""
bank.text(None, IN_PLACE)

# sums from the front; events in a heap
SUMS = """
import heapq
import itertools


def schedule(waiting, running, blocks, size, most):
    queue = [*running, *waiting]
    needs = [-(-(r.prompt + r.done) // size) for r in queue]
    if needs and needs[0] > blocks:
        raise ValueError("too large")
    k = sum(1 for total in itertools.accumulate(needs) if total <= blocks)
    k = min(k, most)
    return queue[k:], queue[:k]


def serve(requests, plan, seconds):
    heap = [(r.arrival, k, r) for k, r in enumerate(requests)]
    heapq.heapify(heap)
    out = {r.number: [] for r in requests}
    now, waiting, running, fresh = 0, [], [], set()
    while heap or waiting or running:
        if not (waiting or running) and heap[0][0] > now:
            now = heap[0][0]
        while heap and heap[0][0] <= now:
            waiting += [heapq.heappop(heap)[2]]
        old = set(map(id, running))
        waiting, running = plan(waiting, running)
        cost = [1 if id(r) in old else r.prompt + r.done for r in running]
        now += seconds(sum(cost))
        stay = []
        for r in running:
            r.done += 1
            out[r.number].append(now)
            if r.done < r.output:
                stay.append(r)
        running = stay
    return out
"""
bank.text(None, SUMS)

bank.text(
    None,
    SUMS.replace("[(r.arrival, k, r) for k, r in enumerate(requests)]", "[(r.arrival, r.number, r) for r in requests]"),
)
bank.slip("nothing-returned", ("    return queue[len(running) :], running\n", ""))
bank.slip("nothing-returned", ("    return times\n", ""))

bank.hint("lists-form", "schedule must return two lists of requests: those that wait, and those that run.")
bank.slip("lists-form", ("return queue[len(running) :], running", "return running"))
bank.slip("lists-form", ("return queue[len(running) :], running", "return tuple(queue[len(running) :]), tuple(running)"))  # fmt: skip
bank.variant("lists-form", SUMS, ("return queue[k:], queue[:k]", "return queue[k:], iter(queue[:k])"))

bank.hint(
    "lost",
    "A request is in neither list, so it will never be served. (If another one is there twice, it "
    "has overtaken this one: stop at the first that doesn't fit.)",
)
bank.slip("lost", ("return queue[len(running) :], running", "return queue[len(running) + 1 :], running"))
bank.slip("lost", ("queue, running, free = running + waiting, [], blocks", "queue, running, free = waiting, [], blocks"))  # fmt: skip
bank.variant("lost", IN_PLACE, ("waiting.insert(0, running.pop())", "running.pop()"))

bank.hint("twice", "A request is in the lists twice. It would be computed twice, and take memory from another one.")
bank.slip("twice", ("return queue[len(running) :], running", "return queue, running"))
bank.slip("twice", ("return queue[len(running) :], running", "return waiting, running"))
bank.variant("twice", IN_PLACE, ("running.append(waiting.pop(0))", "running.append(waiting[0])"), ("while waiting and len(running) < most and used", "if waiting and len(running) < most and used"))  # fmt: skip

bank.hint(
    "wrong-turn",
    "{where}: you get {got} instead of {expected}. Start requests from the front of the "
    "queue while there is room; all requests after them wait.",
)
bank.slip("wrong-turn", ("if needed > free or", "if needed > free - (len(running) > 2) or"))
bank.variant("wrong-turn", SUMS, ("k = min(k, most)", "k = max(min(k, most) - (len(queue) > 5), 0)"))

bank.hint("turned-round", "Requests that should wait run, and those that should run wait. Return (waiting, "
                             "running), in this order.")  # fmt: skip
bank.slip("turned-round", ("return queue[len(running) :], running", "return running, queue[len(running) :]"))
bank.variant("turned-round", SUMS, ("return queue[k:], queue[:k]", "return queue[:k], queue[k:]"))

bank.hint("overtakes", "A small request that came later took the room that a large one is waiting for. If this "
                          "goes on, the large one never runs: stop at the first request that doesn't fit.")  # fmt: skip
bank.slip("overtakes", ("        if needed > free or len(running) == most:\n            break\n", "        if needed > free or len(running) == most:\n            continue\n"), ("return queue[len(running) :], running", "return [one for one in queue if one not in running], running"))  # fmt: skip
OVERTAKING = """    for one in list(waiting):
        if len(running) < most and used + need(one, size) <= blocks:
            waiting.remove(one)
            running.append(one)
            used += need(one, size)
    return waiting, running


def serve"""
bank.variant("overtakes", IN_PLACE, ("    while waiting and len(running) < most and used + need(waiting[0], size) <= blocks:\n        running.append(waiting.pop(0))\n        used += need(running[-1], size)\n    return waiting, running\n\n\ndef serve", OVERTAKING))  # fmt: skip

bank.hint("first-goes-back", "Memory ran out, and you sent back the request that came first. It has waited "
                                "longest and has most to compute again: send back the one that came last.", edge=True)  # fmt: skip
FIRST_BACK = """
def schedule(waiting, running, blocks, size, most):
    needs = lambda group: sum(-(-(one.prompt + one.done) // size) for one in group)
    running, waiting, back = list(running), list(waiting), []
    if running and needs(running[:1]) > blocks or not running and waiting and needs(waiting[:1]) > blocks:
        raise ValueError
    while needs(running) > blocks:
        back.append(running.pop(0))
    waiting = back + waiting
    while not back and waiting and len(running) < most and needs(running + waiting[:1]) <= blocks:
        running.append(waiting.pop(0))
    return waiting, running
"""
SERVE = "\n\ndef serve" + IN_PLACE.split("def serve")[1]
bank.text("first-goes-back", FIRST_BACK + SERVE)
bank.variant("first-goes-back", IN_PLACE, ("waiting.insert(0, running.pop())", "waiting.insert(0, running.pop(0))"))

bank.hint(
    "no-limit",
    "You get {got} instead of {expected} ({where}). No more than `most` requests may run "
    "together, and no fewer if there is room.",
)
bank.slip("no-limit", (" or len(running) == most:", ":"))
bank.slip("no-limit", ("len(running) == most", "len(running) > most"))
bank.slip("no-limit", ("len(running) == most", "len(running) == most - 1"))
bank.variant("no-limit", SUMS, ("    k = min(k, most)\n", ""))

bank.hint("prompt-alone", "You don't count the blocks of the generated tokens. A sequence grows with each step, "
                             "and a request that was sent back needs blocks for all its tokens: prompt + done.")  # fmt: skip
bank.slip("prompt-alone", ("-(-(request.prompt + request.done) // size)", "-(-request.prompt // size)"))
bank.variant("prompt-alone", IN_PLACE, ("(request.prompt + request.done + size - 1)", "(request.prompt + size - 1)"))

bank.hint("not-rounded", "A block is taken whole, even if it is only begun. Count blocks for each request "
                            "separately, rounded up, and none for a token that comes only after the step.", edge=True)  # fmt: skip
bank.slip("not-rounded", ("-(-(request.prompt + request.done) // size)", "(request.prompt + request.done) // size"))
bank.slip("not-rounded", ("-(-(request.prompt + request.done) // size)", "(request.prompt + request.done) / size"))
bank.slip("not-rounded", ("-(-(request.prompt + request.done) // size)", "(request.prompt + request.done) // size + 1"))
bank.variant("not-rounded", IN_PLACE, ("(request.prompt + request.done + size - 1) // size", "(request.prompt + request.done + size) // size"))  # fmt: skip

bank.hint("tokens-for-blocks", "You compare tokens with blocks. A block holds `size` tokens.")
bank.slip("tokens-for-blocks", ("-(-(request.prompt + request.done) // size)", "request.prompt + request.done"), ("if needed > blocks:", "if needed > blocks * size:"))  # fmt: skip
bank.variant("tokens-for-blocks", IN_PLACE, ("(request.prompt + request.done + size - 1) // size", "request.prompt + request.done"), ("need(waiting[0], size) > blocks:\n", "need(waiting[0], size) > blocks * size:\n"))  # fmt: skip

bank.hint(
    "never-back",
    "The running requests went on although they need more blocks than there are. At least one of "
    "them must be sent back.",
)
NEVER_BACK = """
def schedule(waiting, running, blocks, size, most):
    waiting, running = list(waiting), list(running)
    used = sum(-(-(one.prompt + one.done) // size) for one in running)
    for one in list(waiting):
        needed = -(-(one.prompt + one.done) // size)
        if needed > blocks:
            raise ValueError
        if used + needed > blocks or len(running) >= most:
            break
        running.append(waiting.pop(0))
        used += needed
    return waiting, running
"""
bank.text("never-back", NEVER_BACK + SERVE)
bank.variant("never-back", IN_PLACE, ("while running and (sum(need(one, size) for one in running) > blocks or len(running) > most):", "while len(running) > most:"))  # fmt: skip

bank.hint("all-go-back", "Memory ran out, and you sent back more requests than necessary. Each of them must "
                            "compute all its tokens again.", edge=True)  # fmt: skip
ALL_BACK = NEVER_BACK.replace(
    "    for one in list",
    "    if used > blocks:\n        return running[1:] + waiting, running[:1]\n    for one in list",
)
bank.text("all-go-back", ALL_BACK + SERVE)
bank.variant("all-go-back", SUMS, ("    k = sum(1", "    if sum(needs[: len(running)]) > blocks:\n        return queue[1:], queue[:1]\n    k = sum(1"))  # fmt: skip

bank.hint("nobody-joins", "No request joins as long as another one runs: these are static batches. Look at the "
                             "queue before each step.")  # fmt: skip
bank.slip("nobody-joins", ("queue, running, free = running + waiting, [], blocks", "queue, left, running, free = running or waiting, waiting if running else [], [], blocks"), ("return queue[len(running) :], running", "return queue[len(running) :] + left, running"))  # fmt: skip
bank.variant("nobody-joins", IN_PLACE, ("    used = sum(need(one, size) for one in running)\n", "    if running:\n        return waiting, running\n    used = 0\n"))  # fmt: skip

bank.hint("order", "The list of {which} requests is not in order of arrival. A request that was sent back came "
                      "before all those that wait, so it belongs before them.", edge=True)  # fmt: skip
bank.slip("order", ("return queue[len(running) :], running", "left = queue[len(running) :]\n    return [one for one in left if not one.done] + [one for one in left if one.done], running"))  # fmt: skip
bank.slip("order", ("return queue[len(running) :], running", "return queue[len(running) :], running[::-1]"))
bank.slip("order", ("return queue[len(running) :], running", "return sorted(queue[len(running) :], key=lambda one: one.number), running"))  # fmt: skip
bank.variant("order", IN_PLACE, ("waiting.insert(0, running.pop())", "waiting.append(running.pop())"), ("    if waiting and need(waiting[0], size) > blocks", "    back = sum(one.done > 0 and len(running) > 0 and waiting[0].arrival > one.arrival for one in waiting)\n    if back:\n        return waiting, running\n    if waiting and need(waiting[0], size) > blocks"))  # fmt: skip

bank.hint("written", "schedule changed a request. Generated tokens are not lost when a request is sent back, "
                        "and counting them is the work of serve.", edge=True)  # fmt: skip
bank.slip("written", ("        free -= needed\n", "        free -= needed\n        request.done += 1\n"))
bank.slip("written", ("            break\n", "            request.done = 0\n            break\n"))
bank.variant(
    "written",
    SUMS,
    ("    return queue[k:], queue[:k]", "    for r in queue[k:]:\n        r.done = 0\n    return queue[k:], queue[:k]"),
)

bank.hint("never-fits", "You put a request that needs more than all blocks back in the queue, where it blocks "
                           "all others forever. Raise a ValueError.", edge=True)  # fmt: skip
REFUSED = '        if needed > blocks:\n            raise ValueError(f"request {request.number} needs {needed} blocks, there are {blocks}")\n'
bank.slip("never-fits", (REFUSED, ""))
bank.variant("never-fits", SUMS, ("needs[0] > blocks", "needs[0] > 1000"))

bank.hint(
    "other-error",
    "A request that never fits ends in {got}. Raise a ValueError that says which request it is.",
    edge=True,
)
bank.slip("other-error", ("raise ValueError", "raise MemoryError"))
bank.slip("other-error", ("            raise ValueError(f\"request {request.number} needs {needed} blocks, there are {blocks}\")\n", "            assert False, request.number\n"))  # fmt: skip
bank.variant("other-error", IN_PLACE, ("raise ValueError(waiting[0].number)", "raise RuntimeError(waiting[0].number)"))

bank.hint("fits", "You raise a ValueError although each request fits. Raise it only if a single request needs "
                     "more than all blocks: prompt + done tokens, in blocks of `size`. A request that needs "
                     "exactly all blocks still fits.", edge=True)  # fmt: skip
bank.slip("fits", ("if needed > blocks:", "if needed >= blocks:"))
bank.slip("fits", ("-(-(request.prompt + request.done) // size)", "-(-(request.prompt + request.output) // size)"))
bank.slip("fits", ("-(-(request.prompt + request.done) // size)", "request.prompt + request.done"))
bank.variant("fits", SUMS, ("needs[0] > blocks", "sum(needs) > blocks"))

bank.hint("times-form", "serve must return a dictionary: for each request number, the list of the times of its tokens.")
bank.slip("times-form", ("    return times\n", "    return list(times.values())\n"))
bank.slip("times-form", ("    return times\n", "    return {number: each[-1] for number, each in times.items()}\n"))
bank.variant("times-form", SUMS, ("    return out\n", "    return list(out.items())\n"))

bank.hint("tokens", "Not every request got as many tokens as it asked for: {got} instead of {expected} (number: "
                       "tokens). A request that has all its tokens leaves; one that doesn't stays or waits.")  # fmt: skip
bank.slip("tokens", ("one.done < one.output]", "one.done <= one.output]"))
bank.slip("tokens", ("while coming or waiting or running:", "while coming or waiting:"))
bank.slip("tokens", ("        running = [one for one in running if one.done < one.output]\n", "        running = [one for one in running if one.done < one.output - 1]\n"))  # fmt: skip
bank.variant("tokens", SUMS, ("while heap or waiting or running:", "while heap or running:"), ("if not (waiting or running) and heap[0][0] > now", "if not (waiting or running) and heap and heap[0][0] > now"))  # fmt: skip

bank.hint("never-leaves", "serve takes step after step, long after all requests have all their tokens. A "
                             "request that has as many as it asked for must leave `running`, and the loop must end "
                             "when no request is left.")  # fmt: skip
bank.slip("never-leaves", ("        running = [one for one in running if one.done < one.output]\n", ""))
bank.variant("never-leaves", SUMS, ("if r.done < r.output:", "if r.done:"))

bank.hint(
    "wrong-times",
    "{where}: it came at {got} instead of {expected}. The clock advances once in each "
    "step, by the time that all tokens of the step take.",
)
bank.slip("wrong-times", ("        waiting, running = plan(waiting, running)\n", "        waiting, running = plan(waiting, running)\n        now += 0.125\n"))  # fmt: skip
bank.variant("wrong-times", SUMS, ("now += seconds(sum(cost))", "now += max(seconds(one) for one in cost)"))

bank.hint("clock-anew", "The clock starts again with each step. Add the seconds of each step to it.")
bank.slip("clock-anew", ("now += seconds(", "now = seconds("))
bank.variant("clock-anew", IN_PLACE, ("clock = clock + seconds(tokens)", "clock = seconds(tokens)"))

bank.hint("steps-alone", "You give each request its own step. Together they share one step, which reads the "
                            "weights once: add up their tokens, and ask for the seconds once.")  # fmt: skip
bank.slip("steps-alone", ("seconds(sum(1 if one in before else one.prompt + one.done for one in running))", "sum(seconds(1 if one in before else one.prompt + one.done) for one in running)"))  # fmt: skip
bank.variant("steps-alone", IN_PLACE, ("tokens += 1 if one.number in there else one.prompt + one.done", "clock += seconds(1 if one.number in there else one.prompt + one.done)"), ("        clock = clock + seconds(tokens)\n", ""))  # fmt: skip

bank.hint("since-arrival", "These are seconds since the arrival of each request. Return the times of the clock, "
                              "which starts at 0 for all.", edge=True)  # fmt: skip
bank.slip("since-arrival", ("append(now)", "append(now - one.arrival)"))
bank.variant("since-arrival", SUMS, ("append(now)", "append(now - r.arrival)"))

bank.hint("begin-of-step", "A token is ready when its step ends, not when it begins: advance the clock first.")
BEFORE = "        now += seconds(sum(1 if one in before else one.prompt + one.done for one in running))\n"
bank.slip("begin-of-step", (BEFORE, ""), ("        running = [one for one in running if one.done <", "        now += seconds(sum(1 if one in before else one.prompt + one.done - 1 for one in running))\n        running = [one for one in running if one.done <"))  # fmt: skip
bank.variant("begin-of-step", SUMS, ("now += seconds(sum(cost))", "then, now = now, now + seconds(sum(cost))"), ("append(now)", "append(then)"))  # fmt: skip

bank.hint("prompts-free", "A step that computes a prompt takes no longer than a step with a single token. A "
                             "request that joins must compute all its tokens: prompt + done.")  # fmt: skip
bank.slip("prompts-free", ("sum(1 if one in before else one.prompt + one.done for one in running)", "len(running)"))
bank.slip("prompts-free", ("        before = running\n        waiting, running = plan(waiting, running)\n", "        waiting, running = plan(waiting, running)\n        before = running\n"))  # fmt: skip
bank.variant("prompts-free", SUMS, ("1 if id(r) in old else r.prompt + r.done", "1"))

bank.hint("computed-each-step", "Every step costs all tokens of all requests. A request that took part in the "
                                   "previous step still has its keys and values: it computes 1 token.")  # fmt: skip
bank.slip("computed-each-step", ("1 if one in before else one.prompt + one.done", "one.prompt + one.done"))
bank.variant("computed-each-step", SUMS, ("1 if id(r) in old else r.prompt + r.done", "r.prompt + r.done"))

bank.hint("back-for-free", "A request that was sent back returned for the cost of one token, or of its prompt "
                              "alone. Its blocks are gone: it must compute all its tokens again, prompt + done.")  # fmt: skip
bank.slip("back-for-free", ("1 if one in before else one.prompt + one.done", "1 if one.done else one.prompt"))
bank.slip("back-for-free", ("1 if one in before else one.prompt + one.done", "1 if one in before else one.prompt"))
bank.variant("back-for-free", SUMS, ("1 if id(r) in old else r.prompt + r.done", "1 if id(r) in old else r.prompt"))

bank.hint("no-wait-for-arrival", "Either a request had tokens before it arrived, or the clock stood still while "
                                    "there were no requests: it must jump to the next arrival.", edge=True)  # fmt: skip
bank.slip("no-wait-for-arrival", ("            now = max(now, coming[0].arrival)\n", "            pass\n"), ("while coming and coming[0].arrival <= now:", "while coming and (coming[0].arrival <= now or not waiting and not running):"))  # fmt: skip
bank.slip("no-wait-for-arrival", ("while coming and coming[0].arrival <= now:", "while coming:"))
bank.variant("no-wait-for-arrival", SUMS, (" and heap[0][0] > now", " and heap[0][0] < now"), ("while heap and heap[0][0] <= now:", "while heap and (heap[0][0] <= now or not (waiting or running)):"))  # fmt: skip

bank.hint("clock-set-back", "You set the clock to an arrival in the past, or to an arrival although there was "
                               "still a request to serve.", edge=True)  # fmt: skip
bank.slip("clock-set-back", ("        if not waiting and not running:\n            now = max(now, coming[0].arrival)\n", "        if coming:\n            now = max(now, coming[0].arrival)\n"))  # fmt: skip
bank.slip("clock-set-back", ("        if not waiting and not running:\n            now = max(now, coming[0].arrival)\n", "        if not waiting and not running:\n            now = coming[0].arrival\n"))  # fmt: skip
bank.variant("clock-set-back", SUMS, ("if not (waiting or running) and heap[0][0] > now:", "if heap and heap[0][0] > now:"))  # fmt: skip

bank.hint("not-sorted", "The requests were not sorted, and an early one waited for a late one. Sort them by "
                           "arrival.", edge=True)  # fmt: skip
bank.slip("not-sorted", ("sorted(requests, key=lambda one: one.arrival)", "list(requests)"))
bank.slip("not-sorted", ("key=lambda one: one.arrival", "key=lambda one: one.number"))
bank.variant(
    "not-sorted", SUMS, ("    heapq.heapify(heap)\n", "    pop = heap.pop\n"), ("heapq.heappop(heap)", "heap.pop(0)")
)

bank.hint("not-counted", "At the end, `done` of a request is not its `output`. A scheduler that reads it sees a "
                            "sequence that never grows.", edge=True)  # fmt: skip
bank.slip("not-counted", ("coming, waiting, running, now = sorted(requests,", "requests = [dataclasses.replace(one) for one in requests]\n    coming, waiting, running, now = sorted(requests,"))  # fmt: skip
bank.variant("not-counted", SUMS, ("heap = [", "requests = [dataclasses.replace(r) for r in requests]\n    heap = ["))
