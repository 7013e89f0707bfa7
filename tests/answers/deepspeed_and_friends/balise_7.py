"""Answers to balise 7 of 20_deepspeed_and_friends: the loop with Lightning Fabric."""

from tests.answers.bank import Bank

bank = Bank("20_deepspeed_and_friends", 7, whole=True)
hint, slip, variant = bank.hint, bank.slip, bank.variant

# model and optimizer one after the other, clipping and division by hand, a list
BY_HAND = """
def train_with_fabric(model, optimizer, loader, accumulation, max_norm, cpu=True):
    import lightning_fabric

    here = lightning_fabric.Fabric(accelerator="cpu" if cpu else "cuda", strategy="ddp", devices=int(os.environ["WORLD_SIZE"]))
    here.launch()
    net, stepper = here.setup_module(model), here.setup_optimizers(optimizer)
    share = here.setup_dataloaders(loader)
    found, part, count = [], 0.0, 0
    for tokens in share:
        count += 1
        waits = count % accumulation != 0 and count < len(share)
        with here.no_backward_sync(net, enabled=waits):
            loss = language_loss(net, tokens) / accumulation
            here.backward(loss)
        part += loss.detach()
        if not waits:
            nn.utils.clip_grad_norm_(net.parameters(), max_norm)
            stepper.step()
            stepper.zero_grad(set_to_none=False)
            found.append(float(part) * accumulation / ((count - 1) % accumulation + 1))
            part = 0.0
    return found
"""
bank.text(None, BY_HAND)

# knows the boundaries beforehand
GROUPS = """
def train_with_fabric(model, optimizer, loader, accumulation, max_norm, cpu=True):
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu" if cpu else "cuda", devices=int(os.environ["WORLD_SIZE"]))
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    batches = list(fabric.setup_dataloaders(loader))
    for start in range(0, len(batches), accumulation):
        group, losses = batches[start : start + accumulation], []
        for tokens in group:
            with fabric.no_backward_sync(model, enabled=tokens is not group[-1]):
                losses.append(language_loss(model, tokens))
                fabric.backward(losses[-1] / accumulation)
        fabric.clip_gradients(model, optimizer, max_norm=max_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield torch.stack(losses).detach().mean()
"""
bank.text(None, GROUPS)

SETUP = "    model, optimizer = fabric.setup(model, optimizer)\n"
LOADER = "    loader = fabric.setup_dataloaders(loader)\n"
CLIPPED = "            fabric.clip_gradients(model, optimizer, max_norm=max_norm)\n"
STEPPED = "            optimizer.step()\n            optimizer.zero_grad()\n"
KEPT = "        losses.append(loss.detach())\n"
YIELDED = "            yield torch.stack(losses).mean()\n            losses = []\n"
FABRIC = 'Fabric(accelerator="cpu" if cpu else "cuda", devices=int(os.environ["WORLD_SIZE"]))'
DDP_ALONE = """
def train_with_fabric(model, optimizer, loader, accumulation, max_norm, cpu=True):
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

hint("alone", "Two processes run, but Fabric knows {n}. devices is the number of processes that the launcher "
                 'started on this machine: int(os.environ["WORLD_SIZE"]).')  # fmt: skip
slip("alone", ('devices=int(os.environ["WORLD_SIZE"])', "devices=1"))
slip("alone", (', devices=int(os.environ["WORLD_SIZE"])', ""))
bank.text("alone", DDP_ALONE)  # no Fabric at all
bank.text("alone", """
def train_with_fabric(model, optimizer, loader, accumulation, max_norm, cpu=True):
    yield from train_alone(model, optimizer, loader, accumulation, max_norm)
""")  # fmt: skip
variant("alone", BY_HAND, ('int(os.environ["WORLD_SIZE"])', '"auto"'))

hint(
    "not-launched",
    "Call fabric.launch() before everything that Fabric sets up: this is where the processes connect.",
)
slip("not-launched", ("    fabric.launch()\n", ""))
variant("not-launched", BY_HAND, ("    here.launch()\n", ""))

hint("other-shares", "Together, the ranks should see each batch of the loader once. The loader that "
                        "setup_dataloaders returns gives each rank its share: loop over that loader, and do not "
                        "split anything yourself.")  # fmt: skip
slip("other-shares", (LOADER, ""))
slip("other-shares", (LOADER, "    fabric.setup_dataloaders(loader)\n"))
slip(
    "other-shares",
    ("fabric.setup_dataloaders(loader)", "fabric.setup_dataloaders(loader, use_distributed_sampler=False)"),
)
variant("other-shares", BY_HAND, ("share = here.setup_dataloaders(loader)", "share = loader"))

hint("backward-elsewhere", "Each micro-batch needs its own backward before the next one goes forward. Here the "
                              "backwards were {got}, one number for each micro-batch. One backward of the sum "
                              "keeps the activations of all micro-batches; a backward only at the step loses the "
                              "gradients of the others.")  # fmt: skip
BACKWARD = "            fabric.backward(loss / accumulation)\n"
slip("backward-elsewhere", (BACKWARD, "            if due:\n                fabric.backward(loss / accumulation)\n"))
slip(
    "backward-elsewhere",
    (
        BACKWARD,
        "            parts = [*parts, loss] if i % accumulation != 1 else [loss]\n            if due:\n                fabric.backward(sum(parts) / accumulation)\n",
    ),
    ("    losses = []\n    for", "    losses, parts = [], []\n    for"),
)
variant(
    "backward-elsewhere",
    GROUPS,
    (
        "                fabric.backward(losses[-1] / accumulation)\n",
        "                if tokens is group[-1]:\n                    fabric.backward(sum(losses) / accumulation)\n",
    ),
)

hint("never-reduced", "Gradients never travel: each rank trains its own model, and the models drift apart. The "
                         "model that fabric.setup returns is wrapped in DDP. Call that model, and enable "
                         "no_backward_sync only where there is *no* step.")  # fmt: skip
slip(
    "never-reduced",
    (SETUP, "    plain = model\n" + SETUP),
    ("language_loss(model, tokens)", "language_loss(plain, tokens)"),
)
slip("never-reduced", ("enabled=not due", "enabled=True"))
variant("never-reduced", BY_HAND, ("language_loss(net, tokens)", "language_loss(model, tokens)"))

hint("always-reduced", "Gradients travel after each micro-batch, but they are only needed at a step. For all "
                          "other micro-batches, use fabric.no_backward_sync(model, enabled=True) around forward "
                          "and backward.")  # fmt: skip
slip("always-reduced", ("fabric.no_backward_sync(model, enabled=not due)", "contextlib.nullcontext()"))
slip("always-reduced", ("enabled=not due", "enabled=False"))
# DDP decides in the forward pass
slip("always-reduced", ("        with fabric.no_backward_sync(model, enabled=not due):\n            loss = language_loss(model, tokens)\n",
     "        loss = language_loss(model, tokens)\n        with fabric.no_backward_sync(model, enabled=not due):\n"))  # fmt: skip
variant("always-reduced", GROUPS, ("enabled=tokens is not group[-1]", "enabled=tokens is None"))

hint(
    "rest-lost",
    "The loader's last micro-batches are fewer than a full step, and their gradients are lost. Take a step at the "
    "loader's end, too.",
)
slip("rest-lost", (" or i == len(loader)", ""))
slip("rest-lost", (" or i == len(loader)", " or i == 0"))
variant("rest-lost", BY_HAND, (" and count < len(share)", ""))

hint("other-boundaries", "Synchronise the gradients and take a step after each `accumulation` micro-batches and "
                            "at the loader's end. Yours come elsewhere. Do you count from 1? `enabled` is true "
                            "where nothing is to be sent.")  # fmt: skip
slip("other-boundaries", ("enabled=not due", "enabled=due"))
slip("other-boundaries", ("enumerate(loader, 1)", "enumerate(loader)"))
slip("other-boundaries", (KEPT, KEPT + "        optimizer.step()\n"), ("            optimizer.step()\n", ""))
variant("other-boundaries", GROUPS, ("tokens is not group[-1]", "tokens is group[-1]"))

hint(
    "losses-form",
    "Yield one loss for each step, a number or a 0-dimensional tensor: the mean over the step's micro-batches.",
)
slip("losses-form", (YIELDED, ""), (KEPT, "        yield loss.detach()\n"))
slip("losses-form", ("yield torch.stack(losses).mean()", "yield torch.stack(losses)"))
variant("losses-form", GROUPS, ("torch.stack(losses).detach().mean()", "torch.stack(losses).detach()"))

hint(
    "other-gradient",
    "The gradient at a step is not that of one process: the mean over the ranks, with each micro-batch's loss "
    "divided by `accumulation` (also in a shorter last step), clipped by its norm.",
)
slip("other-gradient", ("loss / accumulation", "loss / accumulation / fabric.world_size"))
variant("other-gradient", GROUPS, ("losses[-1] / accumulation", "losses[-1] / fabric.world_size"))

hint(
    "not-divided",
    "The gradient is too large by a factor of the number of micro-batches: fabric.backward does not divide. Divide "
    "the loss by `accumulation`.",
)
slip("not-divided", ("fabric.backward(loss / accumulation)", "fabric.backward(loss)"))
variant("not-divided", GROUPS, ("losses[-1] / accumulation", "losses[-1]"))

hint(
    "cleared",
    "At a step, only the last micro-batch's gradient is left. Call zero_grad() after step(), never before "
    "backward, or you lose what was accumulated.",
)
slip(
    "cleared",
    ("            optimizer.zero_grad()\n", ""),
    ("            fabric.backward", "            optimizer.zero_grad()\n            fabric.backward"),
)
variant(
    "cleared",
    GROUPS,
    ("        optimizer.zero_grad()\n", ""),
    ("                losses.append", "                model.zero_grad()\n                losses.append"),
)

hint("not-clipped", "You do not clip the gradients to a norm of max_norm before the step.")
slip("not-clipped", (CLIPPED, ""))
slip(
    "not-clipped",
    (
        CLIPPED + STEPPED,
        STEPPED.replace("            optimizer.zero_grad()\n", CLIPPED + "            optimizer.zero_grad()\n"),
    ),
)
variant("not-clipped", BY_HAND, ("            nn.utils.clip_grad_norm_(net.parameters(), max_norm)\n", ""))

hint(
    "clipped-by-value",
    "clip_val cuts each number of the gradient separately, which changes its direction. max_norm scales the whole "
    "gradient.",
)
slip("clipped-by-value", ("max_norm=max_norm", "clip_val=max_norm"))
slip("clipped-by-value", ("max_norm=max_norm", "clip_val=max_norm / 10"))
variant("clipped-by-value", GROUPS, ("max_norm=max_norm", "clip_val=max_norm"))

hint("other-weights", "Each step's gradient has the right norm but a different direction. Do you clip before "
                         "the gradients of all micro-batches and ranks are in it? Then each part is scaled by a "
                         "different factor.")  # fmt: skip
slip("other-weights", (KEPT, KEPT + CLIPPED[4:]), ("        if due:\n" + CLIPPED, "        if due:\n"))
variant("other-weights", GROUPS, ("        fabric.clip_gradients(", "                fabric.clip_gradients("))

hint(
    "other-losses",
    "The training is right, but the losses you yield are not. Yield the mean over the micro-batches of this step, "
    "on this rank. A mean over ranks would cost one more message in each step.",
)
slip("other-losses", ("yield torch.stack(losses).mean()", "yield losses[-1]"))
slip("other-losses", ("yield torch.stack(losses).mean()", "yield fabric.all_reduce(torch.stack(losses).mean())"))
slip("other-losses", ("yield torch.stack(losses).mean()", "yield torch.stack(losses).sum()"))
slip("other-losses", ("            losses = []\n", ""))
variant(
    "other-losses",
    GROUPS,
    (
        "yield torch.stack(losses).detach().mean()",
        'yield fabric.all_reduce(torch.stack(losses).detach().mean(), reduce_op="mean")',
    ),
)

hint(
    "never-on-gpu",
    "With cpu=False, on a machine with GPUs, your Fabric still computes on the CPU. Make its accelerator follow "
    "the argument `cpu`.",
)
slip("never-on-gpu", ('accelerator="cpu" if cpu else "cuda"', 'accelerator="cpu"'))
slip("never-on-gpu", ('accelerator="cpu" if cpu else "cuda"', 'accelerator="cpu" if cpu is not None else "cuda"'))
variant("never-on-gpu", BY_HAND, ('accelerator="cpu" if cpu else "cuda"', 'accelerator="cpu"'))
