"""Answers to balise 2 of 02_mixed_precision: the step in bfloat16, and the report of dtypes."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.answers.bank import Bank

bank = Bank("02_mixed_precision", 2)


def moved(images, labels, device):
    return images.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def step(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


def report(model, x, dtype):
    return variant()(model, x, dtype)


def variant(
    choose=None,
    value=None,
    auto=True,
    keep_dtype=True,
    clean=True,
    safe=True,
    evaluate=True,
    restore=True,
    graph=False,
    tensors=True,
):
    """A report with one thing done otherwise."""

    def dtypes_under_autocast(model, x, dtype):
        found, handles = {}, []
        modes = [(m, m.training) for m in model.modules()]
        for name, module in choose(model) if choose else leaves(model):

            def look(module, inputs, output, name=name):
                if not tensors or isinstance(output, torch.Tensor):
                    found[name] = value(module, inputs, output) if value else getattr(output, "dtype", type(output))

            handles.append(module.register_forward_hook(look))

        def finish():
            if clean:
                for handle in handles:
                    handle.remove()
            if restore:
                for module, mode in modes:
                    module.training = mode

        def run():
            if evaluate:
                model.eval()
            with (
                torch.set_grad_enabled(graph),
                torch.autocast(x.device.type, dtype=dtype if keep_dtype else torch.bfloat16, enabled=auto),
            ):
                model(x)

        if safe:
            try:
                run()
            finally:
                finish()
        else:
            run()
            finish()
        return found

    return dtypes_under_autocast


def leaves(model):
    return [(name, m) for name, m in model.named_modules() if not list(m.children())]


# ---------------------------------------------------------------- right

bank.several(None, step, report)


def other_step(model, images, labels, optimizer, device):
    """Loss outside autocast, in float32; gradients cleared at the end."""
    images, labels = moved(images, labels, device)
    with torch.amp.autocast(device_type=device.type, dtype=torch.bfloat16):
        logits = model(images)
    loss = nn.CrossEntropyLoss()(logits.float(), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return [loss.data, logits.float().data]


def other_report(model, x, dtype):
    """Forward methods replaced for a moment; a copy of the statistics put back."""
    found, changed = {}, []
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for name, module in leaves(model):
        original = module.forward

        def forward(*args, name=name, original=original, **kwargs):
            out = original(*args, **kwargs)
            if torch.is_tensor(out):
                found[name] = out.dtype
            return out

        module.forward = forward
        changed.append(module)
    try:
        with torch.inference_mode(), torch.autocast(x.device.type, dtype):
            model(x)
    finally:
        for module in changed:
            del module.forward
        with torch.no_grad():
            model.load_state_dict(state)
    return found


bank.several(None, other_step, other_report)


def global_hook_report(model, x, dtype):
    """One hook for all modules, and a copy of the model."""
    import copy

    model = copy.deepcopy(model).eval()
    names = {module: name for name, module in leaves(model)}
    found = {}

    def look(module, inputs, output):
        if module in names and isinstance(output, torch.Tensor):
            found[names[module]] = output.dtype

    handle = torch.nn.modules.module.register_module_forward_hook(look)
    try:
        with torch.no_grad(), torch.autocast(x.device.type, dtype=dtype):
            model(x)
    finally:
        handle.remove()
    return found


def backward_inside(model, images, labels, optimizer, device):
    images, labels = moved(images, labels, device)
    optimizer.zero_grad(set_to_none=False)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


bank.several(None, backward_inside, global_hook_report)

# ---------------------------------------------------------------- wrong: the step


def changed_step(
    loss_outside=False,
    dtype=torch.bfloat16,
    zero=True,
    update=True,
    reduction="mean",
    convert=False,
    after=None,
    device_type=None,
):
    def bf16_step(model, images, labels, optimizer, device):
        images, labels = moved(images, labels, device)
        if convert:
            model.to(torch.bfloat16)
            images = images.bfloat16()
        if zero:
            optimizer.zero_grad()
        with torch.autocast(device_type or device.type, dtype=dtype, enabled=dtype != torch.float32):
            logits = model(images)
            loss = F.cross_entropy(logits, labels, reduction=reduction)
        if loss_outside:
            loss = F.cross_entropy(logits, labels)
        loss.backward()
        if update:
            optimizer.step()
        return after(loss, logits) if after else (loss.detach(), logits.detach())

    return bf16_step


bank.several("loss-in-half", changed_step(loss_outside=True), report)
bank.several("wrong-dtype", changed_step(dtype=torch.float16), report)
bank.several("wrong-dtype", changed_step(dtype=None), report)  # right on a CPU, float16 on a GPU
bank.several("no-autocast", changed_step(dtype=torch.float32), report)
bank.several("weights-converted", changed_step(convert=True), report)
bank.several("gradients-add-up", changed_step(zero=False), report)
bank.several("no-update", changed_step(update=False), report)
bank.several("sum-not-mean", changed_step(reduction="sum"), report)
bank.several("graph-kept", changed_step(after=lambda loss, logits: (loss, logits)), report)
bank.several("number-returned", changed_step(after=lambda loss, logits: (loss.item(), logits.detach())), report)
bank.several("device-hard-coded", changed_step(device_type="cpu"), report)
bank.several("device-hard-coded", changed_step(device_type="cuda"), report)
bank.several("not-loss-and-logits", changed_step(after=lambda loss, logits: loss.detach()), report)


def rounds_weights(model, images, labels, optimizer, device):
    """A right step; then the weights lose their digits, and stay float32 by name."""
    found = step(model, images, labels, optimizer, device)
    for p in model.parameters():
        p.data = p.data.to(torch.bfloat16).to(torch.float32)
    return found


bank.several("weights-converted", rounds_weights, report)


def rounds_before(model, images, labels, optimizer, device):
    """The weights lose their digits before the forward, "as autocast would have it"."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())
    return step(model, images, labels, optimizer, device)


bank.several("weights-converted", rounds_before, report)


def narrow_gradients(model, images, labels, optimizer, device):
    """The optimizer is given gradients in bfloat16, by a model converted for the step only."""
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
    loss.backward()
    for p in model.parameters():
        with torch.no_grad():
            g = p.grad.bfloat16()
            p.grad = None
            p.data = p.data.bfloat16()
            p.grad = g
    optimizer.step()
    for p in model.parameters():
        p.grad = None
        p.data = p.data.float()
    return loss.detach(), logits.detach()


bank.hint("update-cast", "After the step the {what} are in {got_dtype}. Parameters and gradients must stay in float32.")
bank.several("update-cast", narrow_gradients, report, variant=True)


def waiting(model, images, labels, optimizer, device):
    found = step(model, images, labels, optimizer, device)
    assert found[0].isfinite()
    return found


bank.several("hidden-sync", waiting, report)

# ---------------------------------------------------------------- wrong: the report

bank.several("nothing-returned", step, lambda model, x, dtype: None)
bank.hint("no-dictionary", "Return a dictionary from the name of each module to the dtype of its output.")
bank.several("no-dictionary", step, lambda model, x, dtype: list(report(model, x, dtype).items()), variant=True)
bank.hint("containers-included", "{names} are containers: their output is the output of a module inside. Report "
          "only modules without children.", edge=True)  # fmt: skip
bank.several("containers-included", step, variant(choose=lambda model: list(model.named_modules())), variant=True)
bank.hint("root-only", "You looked only at the network's own children. named_modules() reaches every level, "
          "named_children() does not.")  # fmt: skip
bank.several("root-only", step, variant(choose=lambda model: list(model.named_children())), variant=True)
bank.hint("modules-missing", "These modules are missing: {names}. Go through named_modules(), which reaches every "
          "level.")  # fmt: skip
bank.several(
    "modules-missing",
    step,
    variant(choose=lambda model: [(n, m) for n, m in leaves(model) if list(m.parameters())]),
    variant=True,
)
bank.hint("parameter-dtypes", "These are dtypes of parameters or inputs. Report the dtypes of the outputs under "
          "autocast.")  # fmt: skip
bank.several(
    "parameter-dtypes",
    step,
    lambda model, x, dtype: {name: next(m.parameters(), x).dtype for name, m in leaves(model) if name != "1.pair"},
)
bank.several(
    "parameter-dtypes",
    step,
    lambda model, x, dtype: {name: torch.float32 for name, m in leaves(model) if name not in ("1.pair", "1.unused")},
)
bank.several("parameter-dtypes", step, variant(value=lambda module, inputs, output: torch.float32), variant=True)
bank.hint("outside-autocast", "All outputs are in float32: the network did not run under autocast.")
bank.several("outside-autocast", step, variant(auto=False), variant=True)
bank.hint("dtype-ignored", "The argument dtype is float16 here, but the outputs are in bfloat16.", edge=True)
bank.several("dtype-ignored", step, variant(keep_dtype=False), variant=True)
bank.hint("dtype-by-kind", "The output of {name} is in {wanted_dtype}, not {got_dtype}. Look at the output itself, "
          "not at the kind of module.")  # fmt: skip
bank.several(
    "dtype-by-kind",
    step,
    variant(
        value=lambda module, inputs, output: (
            torch.get_autocast_dtype("cpu") if isinstance(module, nn.Linear) else output.dtype
        )
    ),
)
bank.several("dtype-by-kind", step, variant(value=lambda module, inputs, output: inputs[0].dtype), variant=True)
bank.hint("wrong-names", "The keys must be the names that named_modules() gives, but {names} are not.")
bank.several(
    "wrong-names",
    step,
    variant(choose=lambda model: [(f"{type(m).__name__} {n}", m) for n, m in leaves(model)]),
)
bank.hint("not-tensors", "{names} returns something that is not a tensor: leave it out.", edge=True)
bank.several("not-tensors", step, variant(tensors=False), variant=True)
bank.hint("hooks-left", "{n} hooks are still on the modules, so every later forward pass runs them. Keep their "
          "handles, and remove them even if the forward pass raises.", edge=True)  # fmt: skip
bank.several("hooks-left", step, variant(clean=False))
bank.several("hooks-left", step, variant(safe=False), variant=True)
bank.hint("mode-changed", "{name} was in {mode} mode before your call and is in the other mode after it. Parts of "
          "a network may be in another mode than the whole, a frozen batch norm for example, and train() changes "
          "them all: save and restore the mode of each module.", edge=True)  # fmt: skip
bank.several("mode-changed", step, variant(restore=False))
bank.hint("statistics-changed", "Your report changed {name}: in training mode, batch norm learns from every "
          "forward pass.", edge=True)  # fmt: skip
bank.several("statistics-changed", step, variant(evaluate=False), variant=True)
bank.hint("graph-recorded", "The forward pass recorded a graph, which takes memory for nothing. Use "
          "torch.no_grad().", edge=True)  # fmt: skip
bank.several("graph-recorded", step, variant(graph=True), variant=True)


def memorised(model, x, dtype):
    wide = torch.float32
    return {
        "0": dtype,
        "1.inner.0": dtype,
        "1.inner.1": dtype,
        "1.norm": dtype,
        "2": wide,
        "3": wide,
        "4": dtype,
        "5": wide,
        "6": wide,
    }


bank.several("wrong-names", step, memorised, variant=True)
bank.several("wrong-logits", changed_step(after=lambda loss, logits: (loss.detach(), torch.zeros_like(logits))), report)


def widened_late(model, images, labels, optimizer, device):
    """The loss is computed in bfloat16 and becomes float32 when it is too late."""
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    with torch.autocast(device.type, torch.bfloat16):
        logits = model(images)
    loss = F.cross_entropy(logits, labels).float()
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


bank.several("loss-in-half", widened_late, report)


def written_out(model, images, labels, optimizer, device):
    """The same, in float32 from the logits on."""
    images, labels = moved(images, labels, device)
    optimizer.zero_grad()
    with torch.autocast(device.type, torch.bfloat16):
        logits = model(images)
    logits = logits.float()
    loss = (logits.logsumexp(1) - logits.gather(1, labels[:, None])[:, 0]).mean()
    loss.backward()
    optimizer.step()
    return loss.detach(), logits.detach()


bank.several(None, written_out, report)


def one_mode_for_all(model, x, dtype):
    """The mode of the whole is put back, and given to every part."""
    mode = model.training
    found = variant(restore=False)(model, x, dtype)
    model.train(mode)
    return found


bank.several("mode-changed", step, one_mode_for_all, variant=True)


def last_name(model, x, dtype):
    """Each hook reads the loop's variable when it runs."""
    found, handles = {}, []
    training = [(module, module.training) for module in model.modules()]
    for name, module in leaves(model):

        def look(module, inputs, output):
            if isinstance(output, torch.Tensor):
                found[name] = output.dtype  # noqa: B023  (that is the mistake)

        handles.append(module.register_forward_hook(look))
    model.eval()
    with torch.no_grad(), torch.autocast(x.device.type, dtype):
        model(x)
    for handle in handles:
        handle.remove()
    for module, mode in training:
        module.training = mode
    return found


bank.hint("one-name", "Only {names} is there, though all modules ran. Do all hooks use the loop variable? When "
          "they run, it has its last value: bind the current one, for example as a default "
          "argument, name=name.")  # fmt: skip
bank.several("one-name", step, last_name, variant=True)
bank.slip("no-longer-pinned", ("images = images.to(device", "images = images.bfloat16().to(device"))
bank.slip(
    "step-not-moved",
    (
        "    optimizer.zero_grad()\n",
        '    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")\n    images = images.to(device)\n'
        "    optimizer.zero_grad()\n",
    ),
)
bank.slip("loss-in-half", ("        logits = model(images)\n        loss = F.cross_entropy(logits, labels)\n",
          '        logits = model(images)\n    loss = F.cross_entropy(logits, labels, reduction="none").float().mean()\n'))  # fmt: skip
bank.slip(None, ("    with torch.autocast(device.type, dtype=torch.bfloat16):\n        logits = model(images)\n        loss = F.cross_entropy(logits, labels)\n    loss.backward()\n    optimizer.step()\n",
          "    found = []\n\n    def closure():\n        optimizer.zero_grad()\n        with torch.autocast(device.type, dtype=torch.bfloat16):\n            found[:] = [model(images)]\n"
          "            loss = F.cross_entropy(found[0], labels)\n        loss.backward()\n        return loss\n\n    loss, logits = optimizer.step(closure), found[0]\n"))  # fmt: skip
bank.slip("step-blocks", (", non_blocking=True", ""))
bank.slip("eval-mode", ("    optimizer.zero_grad()\n", "    optimizer.zero_grad()\n    model.eval()\n"))

bank.edge("graph-kept", "number-returned", "hidden-sync", "device-hard-coded", "step-not-moved", "step-blocks")
bank.edge("no-longer-pinned", "eval-mode", "gradients-add-up")
