"""Race of 05: an epoch whose batches are made while the loop works; each side has one helper, a thread or a process."""

import io

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.v2.functional import pil_to_tensor

from dlojz_tp.judging.contest import Contest, device

PHOTOGRAPHS, BATCH, SIDE, WIDTH = 32, 8, 192, 512


class Photographs(Dataset):
    """JPEG files in memory, decoded when asked for: uint8 (3, SIDE, SIDE)."""

    def __init__(self):
        noise = torch.randint(256, (SIDE // 8, SIDE // 8, 3), dtype=torch.uint8).numpy()
        file = io.BytesIO()
        Image.fromarray(noise).resize((SIDE, SIDE)).save(file, "JPEG")
        self.file = file.getvalue()

    def __len__(self):
        return PHOTOGRAPHS

    def __getitem__(self, index):
        return pil_to_tensor(Image.open(io.BytesIO(self.file)))


def _epoch(batches):
    weights = torch.randn(WIDTH, WIDTH, device=device())

    def epoch():
        for images in batches:
            x = images.flatten()[: WIDTH * WIDTH].to(device(), torch.float32, non_blocking=True).view(WIDTH, WIDTH)
            for _ in range(4):
                x = torch.tanh(x @ weights)

    return epoch


def _loader(**options):
    return DataLoader(Photographs(), BATCH, pin_memory=device().type == "cuda", **options)


def yours(Prefetcher):  # noqa: N803
    return _epoch(Prefetcher(_loader(), device()))


def theirs():
    return _epoch(_loader(num_workers=1, persistent_workers=True, multiprocessing_context="fork"))


RACES = {6: Contest("a DataLoader with one worker", yours, theirs)}
