"""Your own training loop with Drumline's data, guards and checkpoints. Kill it at any time and start it again.

python examples/own_loop.py photos                      # photos/train/CLASS/*.jpg
torchrun --nproc-per-node 2 examples/own_loop.py photos
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import drumline

EPOCHS, BATCH, SIZE, SAVE_EVERY = 2, 64, 64, 10


def main(path: str) -> None:
    if "RANK" in os.environ:
        dist.init_process_group()
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else "cpu"
    )
    torch.manual_seed(0)
    feed = drumline.open_feed(path, batch=BATCH, size=SIZE, device=device)
    module = drumline.create_model("resnet20", classes=len(feed.classes)).to(device)
    model = DistributedDataParallel(module) if dist.is_initialized() else module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    step = 0
    if loaded := drumline.checkpoints.load("own-loop", model=model, optimizer=optimizer):
        step = loaded.step
        feed.set_epoch(loaded.extra["epoch"], loaded.extra["position"])  # the exact sample

    with feed, drumline.guard(model, optimizer):
        while feed.epoch < EPOCHS:
            for images, labels, _ in feed:
                loss = nn.functional.cross_entropy(model(images.float() / 127.5 - 1), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if step % SAVE_EVERY == 0:
                    where = {"epoch": feed.epoch, "position": feed.position}
                    drumline.checkpoints.save(
                        "own-loop", step=step, model=model, optimizer=optimizer, extra=where
                    )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
