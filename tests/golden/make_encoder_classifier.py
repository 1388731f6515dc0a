"""Makes encoder_classifier.npz; see README.md. Needs PyTorch: python make_encoder_classifier.py OUT.npz"""

import math
import sys

import numpy as np
import torch
from torch import nn

D_MODEL, NUM_HEADS, D_FF, NUM_LAYERS, NUM_CLASSES, VOCAB_SIZE, MAX_LENGTH = 16, 4, 24, 2, 3, 50, 64


class Model(nn.Module):
    """The parts in the order in which seed 0 draws their weights, and the golden file names them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, D_MODEL, padding_idx=0)
        layer = nn.TransformerEncoderLayer(
            D_MODEL, NUM_HEADS, D_FF, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, NUM_LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(D_MODEL)
        self.out = nn.Linear(D_MODEL, NUM_CLASSES)


def position_table():
    angle = torch.arange(MAX_LENGTH, dtype=torch.float64)[:, None] * torch.exp(
        torch.arange(0, D_MODEL, 2, dtype=torch.float64) * (-math.log(10000.0) / D_MODEL)
    )
    return torch.stack([angle.sin(), angle.cos()], dim=-1).reshape(MAX_LENGTH, D_MODEL).float()


@torch.no_grad()
def main(out):
    torch.manual_seed(0)
    model = Model().eval()
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    model.embedding.weight[0] = 0
    token_ids = torch.randint(1, VOCAB_SIZE, (3, 9))
    token_ids[1, 5:] = 0
    token_ids[2, 1:] = 0

    is_pad = token_ids == 0
    table = position_table()
    x = model.embedding(token_ids) * math.sqrt(D_MODEL) + table[: token_ids.shape[1]]
    encoded = model.encoder(x, src_key_padding_mask=is_pad)
    real = (~is_pad)[..., None]
    pooled = (encoded * real).sum(dim=1) / real.sum(dim=1).clamp_min(1)
    arrays = {f"weight/{name}": weight for name, weight in model.state_dict().items()}
    arrays |= {"position_table": table, "encoder_output": encoded, "logits": model.out(model.norm(pooled))}
    np.savez_compressed(out, token_ids=token_ids.int().numpy(), **{name: a.numpy() for name, a in arrays.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
