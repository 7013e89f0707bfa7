"""Answers to balise 6 of 20_deepspeed_and_friends: the loop with Accelerate."""

from tests.answers.bank import Bank

bank = Bank("20_deepspeed_and_friends", 6, whole=True)
hint, slip, variant = bank.hint, bank.slip, bank.variant

# the prepared optimizer waits by itself where no step is due
WAITING = """
def train_with_accelerate(model, optimizer, loader, accumulation, max_norm, cpu=True):
    import accelerate

    here = accelerate.Accelerator(gradient_accumulation_steps=accumulation, cpu=cpu)
    loader, model, optimizer = here.prepare(loader, model, optimizer)
    total, count = 0.0, 0
    for tokens in loader:
        with here.accumulate(model):
            loss = language_loss(model, tokens)
            here.backward(loss)
            if here.sync_gradients:
                here.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
        total, count = total + loss.detach(), count + 1
        if here.sync_gradients:
            yield total / count
            total, count = 0.0, 0
"""
bank.text(None, WAITING)

# counts by itself, and returns a list
COUNTING = """
def train_with_accelerate(model, optimizer, loader, accumulation, max_norm, cpu=True):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=cpu)
    model, loader = accelerator.prepare(model, loader)
    losses, found = [], []
    for i, tokens in enumerate(loader, 1):
        due = i % accumulation == 0 or i == len(loader)
        with contextlib.nullcontext() if due else accelerator.no_sync(model):
            loss = language_loss(model, tokens)
            accelerator.backward(loss / accumulation)
        losses.append(float(loss.detach()))
        if due:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
            found.append(sum(losses) / len(losses))
            losses = []
    return found
"""
bank.text(None, COUNTING)

MADE = "Accelerator(cpu=cpu, gradient_accumulation_steps=accumulation)"
PREPARED = "    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
CLIPPED = "                accelerator.clip_grad_norm_(model.parameters(), max_norm)\n"
STEPPED = "                optimizer.step()\n                optimizer.zero_grad()\n"
YIELDED = "                yield torch.stack(losses).mean()\n                losses = []\n"
SYNC = "            if accelerator.sync_gradients:\n"

hint("alone", "Two processes run, but the Accelerator knows {n}. On CPUs it only finds the others with "
                 "cpu=True. Without it, each process trains alone on all of the data, without any warning.")  # fmt: skip
slip("alone", ("cpu=cpu, ", ""))
slip("alone", ("cpu=cpu", "cpu=False"))
variant("alone", WAITING, (", cpu=cpu)", ")"))
bank.text("alone", """
def train_with_accelerate(model, optimizer, loader, accumulation, max_norm, cpu=True):
    yield from train_alone(model, optimizer, loader, accumulation, max_norm)
""")  # fmt: skip
# DDP by hand is no Accelerate
BY_HAND = """
def train_with_accelerate(model, optimizer, loader, accumulation, max_norm, cpu=True):
    model = DDP(model)
    sampler = torch.utils.data.DistributedSampler(loader.dataset, shuffle=False)
    loader = torch.utils.data.DataLoader(loader.dataset, loader.batch_size, sampler=sampler)
    losses = []
    for i, tokens in enumerate(loader, 1):
        due = i % accumulation == 0 or i == len(loader)
        with contextlib.nullcontext() if due else model.no_sync():
            loss = language_loss(model, tokens)
            (loss / accumulation).backward()
        losses.append(loss.detach())
        if due:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
            yield torch.stack(losses).mean()
            losses = []
"""
bank.text("alone", BY_HAND)

hint("other-shares", "Together, the ranks should see each batch of the loader once. The loader that prepare "
                        "returns gives each rank its share: loop over that loader, and do not split anything "
                        "yourself.")  # fmt: skip
slip(
    "other-shares",
    (
        "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
        "model, optimizer = accelerator.prepare(model, optimizer)",
    ),
)
slip("other-shares", ("for tokens in loader:", "for tokens in accelerator.skip_first_batches(loader, 1):"))
slip("other-shares", (PREPARED, "    sampler = torch.utils.data.DistributedSampler(loader.dataset, 2, dist.get_rank(), shuffle=False)\n"
     "    loader = torch.utils.data.DataLoader(loader.dataset, loader.batch_size, sampler=sampler)\n" + PREPARED))  # fmt: skip
variant(
    "other-shares",
    COUNTING,
    ("model, loader = accelerator.prepare(model, loader)", "model = accelerator.prepare(model)"),
)

hint("backward-elsewhere", "Each micro-batch needs its own backward before the next one goes forward. Here the "
                              "backwards were {got}, one number for each micro-batch. One backward of the sum "
                              "keeps the activations of all micro-batches; a backward only at the step loses the "
                              "gradients of the others.")  # fmt: skip
BACKWARD = "            accelerator.backward(loss)\n"
slip(
    "backward-elsewhere",
    (BACKWARD, ""),
    (SYNC, SYNC + "                accelerator.backward(sum(parts))\n                parts = []\n"),
    (
        "            losses.append(loss.detach())\n",
        "            losses.append(loss.detach())\n            parts.append(loss)\n",
    ),
    ("    losses = []\n    for", "    losses, parts = [], []\n    for"),
)
slip(
    "backward-elsewhere",
    (BACKWARD, "            if accelerator.sync_gradients:\n                accelerator.backward(loss)\n"),
)
variant(
    "backward-elsewhere",
    COUNTING,
    (
        "            accelerator.backward(loss / accumulation)\n",
        "            if due:\n                accelerator.backward(loss)\n",
    ),
)

hint("never-reduced", "Gradients never travel: each rank trains its own model, and the models drift apart. The "
                         "model that prepare returns is wrapped in DDP. Call that model, and enter "
                         "accumulate(model) again for each micro-batch.")  # fmt: skip
slip("never-reduced", ("model, optimizer, loader =", "_, optimizer, loader ="))
slip("never-reduced", ("language_loss(model, tokens)", "language_loss(accelerator.unwrap_model(model), tokens)"))
variant("never-reduced", COUNTING, ("language_loss(model, tokens)", "language_loss(model.module, tokens)"))

hint("always-reduced", "Gradients travel after each micro-batch, but they are only needed at a step. Use "
                          "accelerator.accumulate(model) around forward and backward, and give the Accelerator the "
                          "number of micro-batches.")  # fmt: skip
slip("always-reduced", ("accelerator.accumulate(model)", "contextlib.nullcontext()"))
slip("always-reduced", (", gradient_accumulation_steps=accumulation", ""))
slip("always-reduced", ("accelerator.accumulate(model)", "accelerator.accumulate()"))
variant(
    "always-reduced",
    COUNTING,
    ("contextlib.nullcontext() if due else accelerator.no_sync(model)", "contextlib.nullcontext()"),
)

hint(
    "rest-lost",
    "The loader's last micro-batches are fewer than a full step, and their gradients are lost. Take a step at the "
    "loader's end, too.",
)
REST = "Accelerator(cpu=cpu, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=accumulation, sync_with_dataloader=False))"
slip(
    "rest-lost",
    (MADE, REST),
    (
        "    from accelerate import Accelerator\n",
        "    from accelerate import Accelerator\n    from accelerate.utils import GradientAccumulationPlugin\n",
    ),
)
variant("rest-lost", COUNTING, (" or i == len(loader)", ""))

hint("other-boundaries", "Take a step where accelerator.sync_gradients is true: after each `accumulation` "
                            "micro-batches and at the loader's end. Your steps are elsewhere. Do you step the "
                            "optimizer that prepare returned, and only there?")  # fmt: skip
slip("other-boundaries", ("model, optimizer, loader = accelerator.prepare(model, optimizer, loader)", "model, loader = accelerator.prepare(model, loader)"),
     (STEPPED, ""), ("            losses.append(loss.detach())\n", "            losses.append(loss.detach())\n            optimizer.step()\n            optimizer.zero_grad()\n"))  # fmt: skip
slip("other-boundaries", ("gradient_accumulation_steps=accumulation", "gradient_accumulation_steps=accumulation + 1"))
slip("other-boundaries", ("                optimizer.step()\n", ""))
variant(
    "other-boundaries",
    WAITING,
    ("here.prepare(loader, model, optimizer)", "*here.prepare(loader, model), optimizer"),
)

hint(
    "losses-form",
    "Yield one loss for each step, a number or a 0-dimensional tensor: the mean over the step's micro-batches.",
)
slip("losses-form", (YIELDED, ""), ("            losses.append(loss.detach())\n", "            yield loss.detach()\n"))
slip("losses-form", ("yield torch.stack(losses).mean()", "yield torch.stack(losses)"))
variant("losses-form", WAITING, ("            yield total / count\n", "            yield [total / count]\n"))

hint("other-gradient", "The gradient at a step is not the mean over all micro-batches and ranks, clipped by its norm.")
slip("other-gradient", ("accelerator.backward(loss)", "accelerator.backward(loss * accelerator.num_processes)"))
variant("other-gradient", COUNTING, ("loss / accumulation)", "loss / accelerator.num_processes)"))

hint(
    "not-divided",
    "The gradient is too large by a factor of the number of micro-batches. accelerator.backward(loss) divides by "
    "it, loss.backward() does not.",
)
slip("not-divided", ("accelerator.backward(loss)", "loss.backward()"))
variant("not-divided", COUNTING, ("accelerator.backward(loss / accumulation)", "accelerator.backward(loss)"))

hint(
    "divided-twice",
    "The gradient is too small by a factor of the number of micro-batches: accelerator.backward(loss) has already "
    "divided by it.",
)
slip("divided-twice", ("accelerator.backward(loss)", "accelerator.backward(loss / accumulation)"))
variant(
    "divided-twice",
    COUNTING,
    ("Accelerator(cpu=cpu)", "Accelerator(cpu=cpu, gradient_accumulation_steps=accumulation)"),
)

hint(
    "cleared",
    "At a step, only the last micro-batch's gradient is left. Call zero_grad() after step(), never before "
    "backward, or you lose what was accumulated.",
)
slip(
    "cleared",
    ("                optimizer.zero_grad()\n", ""),
    (
        "            accelerator.backward(loss)\n",
        "            optimizer.zero_grad()\n            accelerator.backward(loss)\n",
    ),
)
slip(
    "cleared",
    ("                optimizer.zero_grad()\n", ""),
    ("            loss = language_loss", "            model.zero_grad()\n            loss = language_loss"),
)
variant(
    "cleared",
    COUNTING,
    ("            optimizer.zero_grad()\n", ""),
    (
        "            loss = language_loss(model, tokens)\n",
        "            loss = language_loss(model, tokens)\n            model.zero_grad()\n",
    ),
)

hint("not-clipped", "You do not clip the gradients to a norm of max_norm before the step.")
slip("not-clipped", (CLIPPED, ""))
slip(
    "not-clipped",
    (
        CLIPPED + STEPPED,
        STEPPED.replace("                optimizer.zero_grad()\n", CLIPPED + "                optimizer.zero_grad()\n"),
    ),
)
variant(
    "not-clipped",
    WAITING,
    ("                here.clip_grad_norm_(model.parameters(), max_norm)\n", "                pass\n"),
)

hint("other-weights", "Each step's gradient has the right norm but a different direction. Do you clip before "
                         "the gradients of all micro-batches and ranks are in it? Then each part is scaled by a "
                         "different factor.")  # fmt: skip
slip(
    "other-weights",
    (CLIPPED, ""),
    ("            losses.append(loss.detach())\n", "            losses.append(loss.detach())\n" + CLIPPED[4:]),
)
variant(
    "other-weights",
    WAITING,
    (
        "            if here.sync_gradients:\n                here.clip_grad_norm_(model.parameters(), max_norm)\n",
        "            here.clip_grad_norm_(model.parameters(), max_norm)\n",
    ),
)

hint(
    "other-losses",
    "The training is right, but the losses you yield are not. Yield the mean over the micro-batches of this step, "
    "on this rank. A mean over ranks would cost one more message in each step.",
)
slip("other-losses", ("yield torch.stack(losses).mean()", "yield losses[-1]"))
slip(
    "other-losses",
    ("yield torch.stack(losses).mean()", "yield accelerator.reduce(torch.stack(losses).mean(), 'mean')"),
)
variant(
    "other-losses",
    COUNTING,
    (
        "found.append(sum(losses) / len(losses))",
        "mean = torch.tensor(sum(losses) / len(losses))\n            dist.all_reduce(mean)\n            found.append(mean / dist.get_world_size())",
    ),
)
slip("other-losses", ("yield torch.stack(losses).mean()", "yield torch.stack(losses).sum()"))
slip("other-losses", ("                losses = []\n", ""))
variant("other-losses", WAITING, ("            yield total / count\n", "            yield total / accumulation\n"))

hint(
    "never-on-gpu",
    "With cpu=False, on a machine with GPUs, your Accelerator still computes on the CPU. Pass the argument on: "
    "cpu=cpu.",
)
slip("never-on-gpu", ("cpu=cpu", "cpu=True"))
slip("never-on-gpu", ("    accelerator = Acc", '    os.environ["ACCELERATE_USE_CPU"] = "true"\n    accelerator = Acc'))
variant("never-on-gpu", WAITING, ("cpu=cpu", "cpu=True"))
variant("never-on-gpu", COUNTING, ("cpu=cpu", "cpu=cpu is not None"))

bank.edge("alone", "never-on-gpu", "other-losses", "rest-lost")
