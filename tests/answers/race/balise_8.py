"""Answers to balise 8 of 25_race: entries of very different means."""

from tests.answers.bank import Bank

bank = Bank("25_race", 8, whole=True)

# all of it by hand: a network of its own, AdamW, images of 16 x 16, label smoothing, two evaluations in an epoch
BY_HAND = """
class Small(nn.Module):
    def __init__(self, classes, width=12, size=16):
        super().__init__()
        self.size = size
        layers, channels = [], 3
        for out in (width, 2 * width, 4 * width):
            layers += [nn.Conv2d(channels, out, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(out), nn.GELU()]
            channels = out
        self.body, self.head = nn.Sequential(*layers), nn.Linear(channels, classes)

    def forward(self, x):
        x = F.interpolate(x, size=(self.size, self.size), mode="bilinear", antialias=True)
        return self.head(self.body(x).mean((2, 3)))


def entry(photos, seed):
    photos.log("seed", seed)
    torch.manual_seed(seed)
    model = Small(photos.classes).to(DEVICE)
    photos.log("weights_from", "random")
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.05)
    epochs, batch, n = 4, 32, len(photos.train)
    steps = n // batch
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=epochs * steps)
    for epoch in range(epochs):
        order = torch.randperm(n)
        for step in range(steps):
            x, y = photos.read(order[step * batch : (step + 1) * batch])
            loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            if step == steps // 2:
                yield model
        yield model
"""
bank.text(None, BY_HAND)

# no convolution: patches and linear layers, by Muon where it may; an iterator instead of a generator
MUON = """
class Patches(nn.Module):
    def forward(self, x):
        return F.unfold(resized(x, 16), 4, stride=4).mT


def entry(photos, seed):
    photos.log("seed", seed)
    torch.manual_seed(seed)
    photos.log("weights_from", "random")
    model = nn.Sequential(Patches(), nn.Linear(48, 32), nn.GELU(), nn.Flatten(), nn.Linear(512, 32), nn.GELU(), nn.Linear(32, photos.classes)).to(DEVICE)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    optimizers = [torch.optim.Muon(matrices, 0.02), torch.optim.AdamW([p for p in model.parameters() if p.dim() == 1], 0.01)]

    def epoch(_):
        for numbers in torch.randperm(len(photos.train)).split(40):
            x, y = photos.read(numbers)
            F.cross_entropy(model(x), y).backward()
            for one in optimizers:
                one.step()
                one.zero_grad()
        return model

    return map(epoch, range(3))
"""
bank.text(None, MUON)

# the average is what is evaluated
AVERAGED = """
def entry(photos, seed):
    average = None

    def after(model):
        nonlocal average
        average = average or WeightAverage(model, 0.98)
        average.update(model)

    shown = network(photos.classes)
    for _ in train(photos, progressive([16, 16, 16, 24], len(photos.train), BATCH, PEAK), seed, shrink=resized, after=after):
        average.into(shown)
        yield shown
"""
bank.text(None, AVERAGED)

# one network for all runs, for its memory's sake: each run draws all of its weights anew
REDRAWN = """
KEPT = {}


def network(classes):
    model = KEPT.setdefault(classes, small_resnet(8, classes).to(DEVICE))
    for layer in model.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    return model


def train(photos, plan, seed):
    photos.log("seed", seed)
    torch.manual_seed(seed)
    photos.log("weights_from", "random")
    model = network(photos.classes)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for size, batch in plan:
        for numbers in torch.randperm(len(photos.train)).split(batch):
            x, y = photos.read(numbers)
            optimizer.zero_grad()
            F.cross_entropy(model(resized(x, size)), y).backward()
            optimizer.step()
        yield model


def entry(photos, seed):
    return train(photos, [(16, 32), (24, 64), (32, 64)], seed)
"""
bank.text(None, REDRAWN)
bank.text(None, "def entry(photos, seed):\n    return list(train(photos, same_size(len(photos.train), 1), seed))\n")
bank.slip(None, ("sizes = [16, 16, 16, 24, 24]", "sizes = [32, 32]"))

bank.hint("not-models", "You returned {what}. `entry` must be a generator of models: `yield model` after each "
                           "epoch, and the model is evaluated.")  # fmt: skip
bank.slip("not-models", ("yield from train", "train"))
bank.slip("not-models", ("yield from train(", "for model in train("), ("shrink=resized)", "shrink=resized):\n        yield model, photos.evaluate(model)"))  # fmt: skip
bank.slip("not-models", ("yield from train(", "for _ in train("), ("shrink=resized)", "shrink=resized):\n        yield"))  # fmt: skip
bank.variant("not-models", BY_HAND, ("                yield model\n        yield model\n", "                pass\n    return model\n"))  # fmt: skip

bank.hint("nothing-read", "The log has no training image. `photos.read` gives images and logs that. Does your "
                             "loop run at all when there are {images} images?")  # fmt: skip
PRIVATE = "photos.normalised(photos._images[order[step * batch : (step + 1) * batch]]), photos._labels[order[step * batch : (step + 1) * batch]]"  # fmt: skip
bank.text("nothing-read", BY_HAND.replace("photos.read(order[step * batch : (step + 1) * batch])", PRIVATE))
bank.variant("nothing-read", BY_HAND, ("epochs, batch, n = 4, 32", "epochs, batch, n = 4, 4096"), ("total_steps=epochs * steps", "total_steps=100"), ("step == steps // 2", "False"))  # fmt: skip

bank.hint("validation-read", "{n} of the images that you read are not training images. Train only on the "
                                "numbers in `photos.train`.")  # fmt: skip
bank.slip("validation-read", ("    yield from train(", "    for model in train("), ("shrink=resized)", "shrink=resized):\n        x, y = photos.read(photos.validation)\n        F.cross_entropy(model(x), y).backward()\n        yield model"))  # fmt: skip
bank.text("validation-read", BY_HAND.replace("n = 4, 32, len(photos.train)", "n = 4, 32, len(photos.train) + len(photos.validation)"))  # fmt: skip
bank.variant(
    "validation-read",
    MUON,
    ("x, y = photos.read(numbers)", "x, y = photos.read([*numbers.tolist(), photos.validation[-1]])"),
)

bank.hint("sparse", "You read {n} training images before the next evaluation, but there are only {images}. "
                       "Yield the model at the latest after each epoch.")  # fmt: skip
bank.slip("sparse", ("yield from train(", "*_, model = train("), ("shrink=resized)", "shrink=resized)\n    yield model"))  # fmt: skip
bank.text("sparse", REDRAWN.replace("        yield model", "        if size > 16:\n            yield model"))
bank.variant("sparse", BY_HAND, ("                yield model\n        yield model\n", "                pass\n    yield model\n"))  # fmt: skip

bank.hint("too-much-work", "Up to here your run has used {share:.0%} of the FLOP of the whole baseline; 50 % "
                              "are allowed. Use fewer epochs, smaller images or a smaller network.")  # fmt: skip
bank.slip("too-much-work", ("[16, 16, 16, 24, 24]", "[32] * EPOCHS"))
bank.slip("too-much-work", ("[16, 16, 16, 24, 24]", "[16, 16, 24, 24, 32, 32]"))
bank.variant("too-much-work", BY_HAND, ("width=12", "width=64"))

bank.hint("trained-on", "You read {n} images after the last evaluation: nobody sees what the model learns from "
                           "them. Yield the model after an epoch, not before it.")  # fmt: skip
bank.text("trained-on", REDRAWN.replace("        yield model", "").replace("    for size, batch in plan:\n", "    for size, batch in plan:\n        yield model\n"))  # fmt: skip
bank.variant("trained-on", BY_HAND, ("                yield model\n        yield model\n", "                yield model\n"))  # fmt: skip

bank.hint("log-lacks", "The log lacks {what}. Write it in each run with `photos.log(key, value)`.")
bank.text("log-lacks", BY_HAND.replace('    photos.log("seed", seed)\n', ""))
bank.variant("log-lacks", MUON, ('    photos.log("weights_from", "random")\n', ""), ('    photos.log("seed", seed)\n', ""))  # fmt: skip

bank.hint("never-changes", "The weights at the last evaluation are the same as at the first. Do you call "
                              "`optimizer.step()`, with the parameters of the model that you yield?")  # fmt: skip
bank.text("never-changes", BY_HAND.replace("            optimizer.step()\n", ""))
bank.variant("never-changes", REDRAWN, ("            optimizer.step()\n", "            model = copy.deepcopy(model)\n"), ("F.cross_entropy", "model = copy.deepcopy(model)\n            F.cross_entropy"))  # fmt: skip

bank.hint("same-seed", "Two runs with different seeds log the same seed. Log `seed`, and use it.")
bank.slip("same-seed", ("BATCH, PEAK), seed", "BATCH, PEAK), 0"))
bank.variant("same-seed", REDRAWN, ("def train(photos, plan, seed):\n", "def train(photos, plan, seed):\n    seed = 7\n"))  # fmt: skip

bank.hint("same-start", "Two runs with different seeds have nearly the same weights ({share:.0%} of them are "
                           "alike). Do they start with the weights of an earlier run, or with a fixed random "
                           "state? Make a new model in each run, after `torch.manual_seed(seed)`.")  # fmt: skip
bank.text("same-start", REDRAWN.replace("            layer.reset_parameters()\n", "            pass\n"))
bank.text("same-start", BY_HAND.replace("torch.manual_seed(seed)", "torch.manual_seed(0)"))
bank.variant("same-start", MUON, ("def entry(", "LEFT = {}\n\n\ndef entry("), ("    matrices =", "    model = LEFT.setdefault(photos.classes, model)\n    matrices ="))  # fmt: skip

bank.hint("low-accuracy", "The accuracy at the end is {share:.2f}, on images that are easy to tell apart. Do "
                             "images and labels belong together? Are there enough steps for {images} images? Is "
                             "the rate too low or too high?")  # fmt: skip
bank.text("low-accuracy", BY_HAND.replace("F.cross_entropy(model(x), y,", "F.cross_entropy(model(x), y[torch.randperm(len(y))],"))  # fmt: skip
bank.slip("low-accuracy", ("BATCH, PEAK)", "BATCH, 1e4 * PEAK)"))
bank.variant("low-accuracy", MUON, ("F.cross_entropy(model(x), y)", "(-F.cross_entropy(model(x), y))"))

bank.hint("fixed-classes", "With 20 classes the model gives {n} numbers per image. Use `photos.classes`: it "
                              "says how many classes there are.")  # fmt: skip
bank.text("fixed-classes", BY_HAND.replace("Small(photos.classes)", "Small(15)"))
bank.variant("fixed-classes", REDRAWN, ("network(photos.classes)", "network(10)"))
