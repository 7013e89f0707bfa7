"""Answers to balise 3 of 18_long_sequences_and_experts: ring attention."""

from tests.answers.bank import Bank

bank = Bank("18_long_sequences_and_experts", 3, whole=True)

# keys and values in messages of their own, two buffers in turn; pieces are joined by their log-sum-exp
BUFFERS = """
def add_piece(state, q, k, v, rank, source):
    if source > rank:
        return state
    k, v = (x.to(state.weighted.dtype).repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = scores_of(q, k)
    if source == rank:
        scores += torch.full(scores.shape[-2:], -math.inf, device=q.device).triu(1)
    lse = scores.logsumexp(-1)
    new = torch.logaddexp(state.maximum + state.total.log(), lse)
    old, added = torch.exp(state.maximum - new), torch.exp(lse - new)
    weighted = old[..., None] * state.weighted + added[..., None] * (scores.softmax(-1) @ v)
    return State(new, old * state.total + added, weighted)


def ring_attention(q, k, v, add=add_piece):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    here = [x.clone(memory_format=torch.contiguous_format) for x in (k, v)]
    spare, state, source = [torch.empty_like(x) for x in here], start(q), rank
    while True:
        works, last = [], source == (rank + 1) % ranks
        if not last:
            ops = [dist.P2POp(dist.isend, x, (rank + 1) % ranks) for x in here]
            ops += [dist.P2POp(dist.irecv, x, (rank - 1) % ranks) for x in spare]
            works = dist.batch_isend_irecv(ops)
        state = add(state, q, here[0], here[1], rank, source)
        [work.wait() for work in works]
        if last:
            return finish(state)[0].type_as(q)
        here, spare, source = spare, here, (source - 1) % ranks
"""
bank.text(None, BUFFERS)

# no batch: even ranks send first, odd ranks receive first
IN_TURN = """
def add_piece(state, q, k, v, rank, source):
    if source < rank:
        state = add_block(state, q, k, v)
    elif source == rank:
        for first in range(q.shape[2]):
            one = State(*(x[:, :, first:] for x in state))
            new = add_block(one, q[:, :, first:], k[:, :, first : first + 1], v[:, :, first : first + 1])
            state = State(*(torch.cat([x[:, :, :first], y], 2) for x, y in zip(state, new)))
    return state


def ring_attention(q, k, v, add=add_piece):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    state, mine = start(q), torch.cat([k, v])
    for source in range(rank, rank - ranks, -1):
        if source > rank - ranks + 1:
            into = torch.empty_like(mine)
            begin = [lambda: dist.isend(mine, (rank + 1) % ranks), lambda: dist.irecv(into, (rank - 1) % ranks)]
            first, second = (one() for one in (begin[::-1] if rank % 2 else begin))
        state = add(state, q, *mine.chunk(2), rank, source % ranks)
        if source > rank - ranks + 1:
            first.wait()
            second.wait()
            mine = into
    out, _ = finish(state)
    return out.to(q.dtype)
"""
bank.text(None, IN_TURN)

PIECE = "return state if source > rank else add_block(state, q, k, v, visible)"
POSTED = "messages = dist.batch_isend_irecv([dist.P2POp(dist.isend, held, to), dist.P2POp(dist.irecv, coming, by)])"
ADDED = "        state = add(state, q, *held, rank, (rank - step) % ranks)\n"
WAITED = "        for message in messages:\n            message.wait()\n"

SEPARATE = [("held = start(q), torch.stack([k, v])", "held = start(q), [k, v]"), ("torch.empty_like(held)", "[torch.empty_like(x) for x in held]"), (POSTED, "messages = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, to) for x in held] + [dist.P2POp(dist.irecv, x, by) for x in coming])")]  # fmt: skip

bank.hint("future-computed", "Of a piece in the future, {n} multiplications were done. Its keys are all hidden: if source > rank, "
                                "return the State as it is.")  # fmt: skip
bank.slip("future-computed", ("state if source > rank else ", ""))
bank.slip("future-computed", ("else None", "else None if source < rank else torch.zeros_like(triangle(q))"), ("state if source > rank else ", ""))  # fmt: skip
bank.variant(
    "future-computed",
    BUFFERS,
    ("    if source > rank:\n        return state\n", ""),
    ("if source == rank", "if source >= rank"),
)
bank.variant("future-computed", IN_TURN, ("if source < rank:", "if source != rank:"))

bank.hint("wrong-piece", "add_piece is wrong for some of the pieces. From an earlier rank, every query sees every key; of its own "
                            "piece, what triangle(q) says; of a later one, nothing.")  # fmt: skip
bank.slip("wrong-piece", ("triangle(q) if source == rank else None", "None"))
bank.slip("wrong-piece", ("triangle(q) if source == rank else None", "triangle(q)"))
bank.slip("wrong-piece", ("source > rank", "source >= rank"))
bank.slip("wrong-piece", ("source > rank", "source != rank"))
bank.slip("wrong-piece", ("triangle(q) if", "triangle(q).T if"))
bank.variant("wrong-piece", BUFFERS, (".triu(1)", ".triu()"))
bank.variant("wrong-piece", IN_TURN, ("if source < rank:", "if source == rank - 1:"))

bank.hint(
    "wrong-ring",
    "This isn't the causal attention of this rank's queries over the keys of all ranks, in the dtype of q.",
)
bank.slip("wrong-ring", ("*held, rank", "held[1], held[0], rank"))
bank.slip("wrong-ring", ("state = add(state, q, *held", "state = add(start(q), q, *held"))
bank.slip("wrong-ring", ("finish(state)[0].to(q.dtype)", "finish(state)[0]"))
bank.slip("wrong-ring", ("finish(state)[0].to(q.dtype)", "state.weighted.to(q.dtype)"))
bank.slip("wrong-ring", ("        held = coming\n", ""))
bank.variant("wrong-ring", BUFFERS, ("here[0], here[1], rank", "here[0], here[0], rank"))
bank.variant("wrong-ring", IN_TURN, ("            mine = into\n", ""))

bank.hint("wrong-source", "Rank {rank} called `add` for the pieces of ranks {got}, not {expected}. Call it for each piece, those in "
                             "the future too: a piece goes one rank further in each step.")  # fmt: skip
bank.slip("wrong-source", ("(rank - step) % ranks", "(rank + step) % ranks"))
bank.slip("wrong-source", ("(rank - step) % ranks", "step"))
bank.slip("wrong-source", ("        state = add(", "        if rank >= step:\n            state = add("))
bank.slip("wrong-source", ("range(ranks)", "range(ranks - 1)"), ("if step + 1 < ranks", "if True"))
bank.variant("wrong-source", IN_TURN, ("        state = add(", "        if source >= 0:\n            state = add("))
bank.variant("wrong-source", BUFFERS, ("spare, here, (source - 1) % ranks", "spare, here, (source - 1) % ranks"), ("rank, source)\n        [", "rank, rank)\n        ["))  # fmt: skip

bank.hint("gathered", "You called {name}. Keys and values go in messages to the next rank, (rank + 1) % N, and nowhere else: a "
                         "collective such as all_gather holds all pieces at once.")  # fmt: skip
bank.slip("gathered", ("ranks = dist.get_rank(), dist.get_world_size()\n", "ranks = dist.get_rank(), dist.get_world_size()\n    every = [torch.stack([k, v]) for _ in range(ranks)]\n    dist.all_gather(every, torch.stack([k, v]))\n"), ("            " + POSTED, "            pass"), ("*held, rank", "*every[(rank - step) % ranks], rank"))  # fmt: skip
bank.slip("gathered", ("(rank + 1) % ranks, (rank - 1) % ranks", "(rank - 1) % ranks, (rank + 1) % ranks"), ("(rank - step)", "(rank + step)"))  # fmt: skip
bank.variant("gathered", IN_TURN, ("    state, mine = start(q), torch.cat([k, v])\n", "    state, mine = start(q), torch.cat([k, v])\n    dist.barrier()\n    dist.broadcast(mine.clone(), 0)\n"))  # fmt: skip

bank.hint(
    "not-waited",
    "You use keys and values before they have arrived: call wait() on all that batch_isend_irecv returns.",
)
bank.slip("not-waited", (WAITED, ""))
bank.slip("not-waited", ("for message in messages:", "for message in messages[:1]:"))
bank.variant("not-waited", BUFFERS, ("        [work.wait() for work in works]\n", ""))
bank.variant("not-waited", IN_TURN, ("            first.wait()\n            second.wait()\n", "            (second if rank % 2 else first).wait()\n"))  # fmt: skip

bank.hint("send-dropped", "Nobody waits for a message that was sent. Without its handle, it may be lost, or its memory "
                             "reused before it has left: wait() for the isend, too.")  # fmt: skip
bank.slip("send-dropped", ("for message in messages:", "for message in messages[1:]:"))
bank.slip("send-dropped", ("message.wait()\n", "message.wait() if message is messages[-1] else None\n"))
bank.variant("send-dropped", BUFFERS, ("for work in works]", "for work in works[2:]]"))

bank.hint("not-hidden", "No message travels while rank {rank} computes: {when}. Start it before `add`, and wait after.")
bank.slip("not-hidden", (ADDED + WAITED, WAITED + ADDED))
bank.slip("not-hidden", (ADDED, ""), ("        if step + 1 < ranks:\n", ADDED + "        if step + 1 < ranks:\n"))
bank.slip("not-hidden", (ADDED, ""), (WAITED, WAITED + ADDED))
bank.variant(
    "not-hidden",
    BUFFERS,
    ("works = dist.batch_isend_irecv(ops)", "[work.wait() for work in dist.batch_isend_irecv(ops)]"),
)
bank.variant("not-hidden", IN_TURN, ("begin[::-1] if rank % 2 else begin))\n", "begin[::-1] if rank % 2 else begin))\n            first.wait(), second.wait()\n"), ("            first.wait()\n            second.wait()\n", ""))  # fmt: skip

bank.hint("too-much-sent", "Rank {rank} sent {got} bytes; {expected} are enough. Keys and values travel in their own dtype, with the heads that they have, and not after "
                              "the last step.", edge=True)  # fmt: skip
bank.slip("too-much-sent", ("if step + 1 < ranks", "if ranks > 1"))
bank.slip("too-much-sent", ("    state, held = start(q), torch.stack([k, v])", "    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))\n    state, held = start(q), torch.stack([k, v])"))  # fmt: skip
bank.slip("too-much-sent", ("torch.stack([k, v])", "torch.stack([k, v]).to(start(q).total.dtype)"))
bank.variant("too-much-sent", BUFFERS, ("if last:", "if source == rank + 1 - ranks or last:"), ("works, last = [], source == (rank + 1) % ranks\n        if not last:", "works, last = [], source == (rank + 1) % ranks\n        if ranks > 1:"))  # fmt: skip
bank.variant(
    "too-much-sent",
    IN_TURN,
    ("torch.cat([k, v])", "torch.cat([k, v]).repeat_interleave(q.shape[1] // k.shape[1], 1)"),
)

bank.hint("received-into-sent", "A message arrives in the memory of the piece that is being sent, and that `add` computes with: what it reads depends "
                                   "on which rank is quicker. Receive into other memory.")  # fmt: skip
bank.slip("received-into-sent", ("torch.empty_like(held)", "held"))
bank.slip("received-into-sent", ("dist.irecv, coming, by", "dist.irecv, held, by"), ("        held = coming\n", ""))
bank.variant("received-into-sent", BUFFERS, ("[torch.empty_like(x) for x in here]", "here"))
bank.variant("received-into-sent", IN_TURN, ("into = torch.empty_like(mine)", "into = mine"))

bank.hint("overwritten", "k and v have changed: you receive into them, and the caller still needs them, for backward for example. "
                            "Work on a copy, or receive into new memory.", edge=True)  # fmt: skip
bank.variant("overwritten", BUFFERS, ("x.clone(memory_format=torch.contiguous_format)", "x.contiguous()"))
SWAPPED = [("held = start(q), torch.stack([k, v])", "held = start(q), [k.contiguous(), v.contiguous()]\n    spare = [torch.empty_like(x) for x in held]"), ("torch.empty_like(held)", "spare"), (POSTED, SEPARATE[2][1]), ("        held = coming\n", "        held, spare = coming, held\n")]  # fmt: skip
bank.slip("overwritten", *SWAPPED)

bank.hint("holds-all", "Rank {rank} holds {n} pieces of keys and values at once. The promise is memory: keep the piece that you compute with and "
                          "the one that arrives, and let go of those that you have used.")  # fmt: skip
bank.slip("holds-all", ("held = start(q), torch.stack([k, v])\n", "held = start(q), torch.stack([k, v])\n    pieces = []\n"), ("        held = coming\n", "        pieces.append(held)\n        held = coming\n"))  # fmt: skip
bank.slip("holds-all", ("held = start(q), torch.stack([k, v])\n", "held = start(q), torch.stack([k, v])\n    room = torch.empty(ranks, *held.shape, dtype=held.dtype)\n"), ("torch.empty_like(held)", "room[step]"))  # fmt: skip
bank.variant("holds-all", IN_TURN, ("    out, _ = finish(state)\n", "    del every\n    out, _ = finish(state)\n"), ("    state, mine = start(q), torch.cat([k, v])\n", "    state, mine = start(q), torch.cat([k, v])\n    every = [mine]\n"), ("            mine = into\n", "            mine = into\n            every.append(mine)\n"))  # fmt: skip

bank.hint("not-contiguous", "It fails for keys and values that are transposed views, which is how layers make them: {error}. "
                               "contiguous() makes what can be sent.", edge=True)  # fmt: skip
bank.slip("not-contiguous", *SEPARATE)
bank.variant("not-contiguous", BUFFERS, ("x.clone(memory_format=torch.contiguous_format)", "x.clone()"))

bank.hint("stuck-on-nccl", "This works on gloo, but NCCL would wait without end: it carries the messages of a rank in order, and every rank begins "
                              "with a send that the next one isn't ready for. Start both in one batch_isend_irecv.", edge=True)  # fmt: skip
bank.slip("stuck-on-nccl", (POSTED, "messages = [dist.isend(held, to), dist.irecv(coming, by)]"))
bank.slip("stuck-on-nccl", (POSTED, "messages = [dist.irecv(coming, by), dist.isend(held, to)]"))
bank.variant("stuck-on-nccl", IN_TURN, ("begin[::-1] if rank % 2 else begin", "begin"))

bank.hint("ring-waits", "The ranks wait for each other: {error}. If each sends before it receives, nobody receives: isend and irecv only start a "
                           "message.")  # fmt: skip
bank.slip("ring-waits", (POSTED, "dist.send(held, to)\n            dist.recv(coming, by)"))
bank.slip("ring-waits", (POSTED, "dist.isend(held, to).wait()\n            messages = [dist.irecv(coming, by)]"))
bank.slip("ring-waits", (POSTED, "dist.recv(coming, by)\n            dist.send(held, to)"))
bank.variant("ring-waits", IN_TURN, ("first, second = (one() for one in (begin[::-1] if rank % 2 else begin))", "second = begin[1]()\n            second.wait()\n            first = begin[0]()"))  # fmt: skip

bank.edge("wrong-device")
bank.slip(
    "wrong-device",
    ("visible = triangle(q) if", "visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril() if"),
)
bank.variant("wrong-device", BUFFERS, (", -math.inf, device=q.device)", ", -math.inf)"))
