"""Detects early that a run does not learn: pure functions of its loss and accuracy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from drumline.core.text import loss_text

STEPS, EPOCHS = 200, 2
"""A run has this long to be better than a guess. One that ends before that many steps was too short to judge."""
SIGMAS = 3
"""How far a score has to be above that of a guess before it counts as better."""


@dataclass
class Trend:
    """The trend of one run. Each warning is given once; the one about accuracy again after the last step."""

    classes: int
    guess: float
    """Accuracy of a model that always predicts the most frequent class of the evaluation set."""
    total: int
    per_epoch: int
    is_cross_entropy: bool = True
    """Whether the training loss is a plain cross-entropy, whose value for a random guess is known."""
    _first_loss: float | None = None
    _exploded: bool = False
    _at_chance: bool = False

    def loss(self, step: int, loss: float) -> str:
        """A warning if the training loss, averaged since the previous call, explodes."""
        guess, first = math.log(self.classes), self._first_loss
        # Untrained weights may be far worse than a random guess for a few steps.
        limit = 10 * guess if first is None else max(2 * guess, 1.5 * first)
        self._first_loss = loss if first is None else first
        if self._exploded or not self.is_cross_entropy or not loss > limit:
            return ""
        self._exploded = True
        return (
            f"WARNING: the loss is exploding: {loss_text(loss)} by step {step:,}, where a random guess among "
            f"{self.classes} classes has {loss_text(guess)}. Try a tenth of optim.lr, more optim.warmup_epochs, or "
            "optim.clip=1; see docs/accuracy.md"
        )

    def accuracy(self, step: int, correct: int, samples: int) -> str:
        """A warning if an evaluation is no better than a guess."""
        margin = SIGMAS * math.sqrt(self.guess * (1 - self.guess) / samples)
        if correct / samples > self.guess + margin or (self._at_chance and step < self.total):
            return ""
        epochs = EPOCHS * self.per_epoch
        if step == self.total < STEPS and step >= epochs:
            return (
                f"WARNING: after only {step:,} steps, top-1 ({correct / samples:.2%}) is no better than always "
                f"predicting the most frequent class ({self.guess:.2%}): train longer"
            )
        if step < max(STEPS, epochs):
            return ""
        self._at_chance = True
        return (
            f"WARNING: the model is not learning: top-1 is {correct / samples:.2%} after {step:,} steps; always "
            f"predicting the most frequent class gives {self.guess:.2%}. Check the labels (drumline verify DATA), "
            "try a tenth of optim.lr and ten times it, increase train.epochs, or start from trained weights "
            "(finetune=WEIGHTS); see docs/accuracy.md"
        )
