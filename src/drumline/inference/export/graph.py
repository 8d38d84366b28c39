"""The module that is exported: the trained model between normalisation and softmax.

Promises: it computes what `TrainedModel.from_pixels` computes, with the same operations. This file does not postpone
annotations, because TorchScript reads them.
"""

from torch import Tensor, nn

from drumline.inference.model import TrainedModel
from drumline.training.sets import Normalise


class FromPixels(nn.Module):
    """uint8 pixels (batch, size, size, 3) in, probabilities (batch, outputs) out."""

    mean: Tensor
    std: Tensor

    def __init__(self, trained: TrainedModel) -> None:
        super().__init__()
        record = trained.record
        normalise = Normalise.build(record.mean, record.std, trained.device, channels_last=False)
        self.model = trained.model
        self.register_buffer("mean", normalise.mean)
        self.register_buffer("std", normalise.std)

    # Plain operations, because TorchScript cannot compile `Normalise`.
    def forward(self, pixels: Tensor) -> Tensor:
        images = (pixels.permute(0, 3, 1, 2) - self.mean) / self.std
        logits: Tensor = self.model(images.contiguous())
        return logits.float().softmax(dim=1)
