"""Race of 23: 32 tokens after a prompt of 16, by a small Llama. PyTorch has no such loop; transformers has one."""

import torch

from dlojz_tp import frameworks
from dlojz_tp.judging.contest import Contest, device
from dlojz_tp.models import Llama, LlamaConfig

PROMPT, COUNT = 16, 32


def _model():
    torch.manual_seed(0)
    model = Llama(LlamaConfig(1000, width=128, heads=8, kv_heads=2, layers=4, max_length=512)).to(device()).eval()
    return model, torch.randint(1000, (1, PROMPT), device=device())


def yours(Cache, write):  # noqa: N803
    model, prompt = _model()
    return lambda: write(model, prompt, COUNT, Cache().attend)


def theirs():
    frameworks.need("transformers")
    from dlojz_tp.models.hugging_face import in_transformers

    model, prompt = _model()
    model, options = in_transformers(model), {"attention_mask": torch.ones_like(prompt), "do_sample": False}
    return lambda: model.generate(prompt, max_new_tokens=COUNT, **options)


RACES = {1: Contest("generate of transformers", yours, theirs)}
