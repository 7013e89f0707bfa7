"""The course's models train on a pretended GPU as on the CPU: the same losses, and all of them on the GPU."""

import torch
from torch.nn import functional as F

from dlojz_tp import launch
from dlojz_tp.judging.pretend_gpu import pretend_gpu
from dlojz_tp.models.llama import Llama, LlamaConfig


def llama_losses(device):
    torch.manual_seed(0)
    model = Llama(LlamaConfig(vocab_size=64, width=32, layers=2, max_length=32)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=False, foreach=False)
    tokens = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(1)).to(device)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    devices = {str(t.device) for t in (*model.state_dict().values(), *optimizer.state[model.head.weight].values())}
    return torch.stack(losses).tolist(), devices


def resnet_losses(device):
    from torchvision.models.resnet import BasicBlock, ResNet

    torch.manual_seed(0)
    model = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1)).to(device)
    labels = torch.arange(4).to(device)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist(), {str(t.device) for t in model.state_dict().values()}


def everywhere(train):
    expected, _ = train("cpu")
    with pretend_gpu() as gpu:
        found, devices = train("cuda")
        return expected, found, devices, [wait.why for wait in gpu.waits], gpu.peak[0] > 0


def check(train, waits):
    expected, found, devices, seen, used = launch.ranks(everywhere, train, n=1)[0]
    assert found == expected and devices <= {"cuda:0", "cpu"} and used
    assert [why for why in seen if why != "copy to gpu"] == waits
    return devices


def test_llama_with_adamw():
    devices = check(llama_losses, ["tolist"])
    assert devices == {"cuda:0", "cpu"}  # AdamW counts its steps on the CPU


def test_resnet_in_bfloat16():
    assert check(resnet_losses, ["tolist"]) == {"cuda:0"}
