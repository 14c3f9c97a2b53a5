"""Train a small network with a framework and its adapter.

    python frameworks.py pytorch|pytorch-sharded|lightning|huggingface DIRECTORY STEPS

Writes a line for each step to DIRECTORY/log, and DIRECTORY/result at the end. Whatever is random in it, dropout and the
order of the data, has to go on after an interruption as it would have.
"""

import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
PAUSE_SECONDS = 0.02


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 2))


def picture(step: int) -> Tensor:
    """Return what a step is of on this rank."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step * RANKS + RANK))


def loss_of(output: Tensor, given: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, (given[:, 0] > 0).long())


def log(home: Path, step: int, what: float = 0.0) -> None:
    time.sleep(PAUSE_SECONDS)
    if RANK == 0:
        with (home / "log").open("a") as file:
            file.write(f"{step} {what!r}\n")


def finish(home: Path, model: nn.Module) -> None:
    if RANK == 0:
        whole = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        (home / "result").write_bytes(whole.numpy().tobytes())


def with_pytorch(home: Path, steps: int, *, sharded: bool) -> None:
    from queuectl.trainer import pytorch

    model = network()
    if RANKS > 1:
        distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(RANK)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    job = pytorch.start(home / "checkpoints", every_steps=7, sharded=sharded)
    checkpoint = job.resume()
    if checkpoint:
        pytorch.load(job, checkpoint, model=model, optimizer=optimizer, schedule=schedule)
    for step in range(checkpoint.step + 1 if checkpoint else 1, steps + 1):
        optimizer.zero_grad()
        loss = loss_of(model(picture(step)), picture(step))
        loss.backward()
        optimizer.step()
        schedule.step()
        log(home, step, loss.item())
        if job.should_save(step):
            with job.saving(step) as folder:
                pytorch.save(job, folder, model=model, optimizer=optimizer, schedule=schedule)
        if job.stopping:
            sys.exit(143)
    finish(home, model)


class Resumable(torch.utils.data.IterableDataset[Tensor]):
    """The pictures of all steps, as a loader that knows where it is."""

    def __init__(self, steps: int) -> None:
        self.steps, self.done = steps, 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.done < self.steps:
            self.done += 1
            yield picture(self.done)

    def __len__(self) -> int:
        return self.steps

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


def with_lightning(home: Path, steps: int) -> None:
    import lightning

    from queuectl.trainer.lightning import QueuectlCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()
            self.net[1] = nn.Identity()  # Lightning does not save random states

        def training_step(self, batch: Tensor, _index: int) -> Tensor:
            loss = loss_of(self.net(batch), batch)
            log(home, self.trainer.global_step + 1, loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    callback = QueuectlCallback(home / "checkpoints", every_steps=7)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="auto" if RANKS == 1 else "ddp",
        max_epochs=1,
        callbacks=[callback],
        default_root_dir=home,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    module = Module()
    trainer.fit(module, train_dataloaders=Resumable(steps), ckpt_path=callback.resume_path())
    finish(home, module)


def with_huggingface(home: Path, steps: int) -> None:
    import transformers

    from queuectl.trainer.huggingface import QueuectlCallback

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, given: Tensor) -> dict[str, Tensor]:
            return {"loss": loss_of(self.net(given), given)}

    class Log(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            log(home, state.global_step)

    model = Model()
    arguments = transformers.TrainingArguments(
        output_dir=str(home / "output"),
        max_steps=steps,
        per_device_train_batch_size=4,
        save_strategy="steps",
        save_steps=7,
        save_total_limit=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
    )
    callback = QueuectlCallback(home / "checkpoints")
    data = [
        {"given": row} for step in range(64) for row in torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    ]
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[Log(), callback])
    trainer.train(resume_from_checkpoint=callback.resume())
    finish(home, model)


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    kind, home, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    match kind:
        case "lightning":
            with_lightning(home, steps)
        case "huggingface":
            with_huggingface(home, steps)
        case _:
            with_pytorch(home, steps, sharded=kind.endswith("sharded"))


if __name__ == "__main__":
    main()
