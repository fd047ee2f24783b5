"""A small vision transformer on the digits of scikit-learn, with Hugging Face's Trainer: one line is Shardline's.

shardline train --script examples/transformers/train.py --ps 2 --workers 2
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset
from transformers import EvalPrediction, TrainingArguments, ViTConfig, ViTForImageClassification

from shardline.integrations.transformers import ShardlineTrainer as Trainer  # was: from transformers import Trainer

TEST_SAMPLES = 360


class Digits(Dataset[dict[str, torch.Tensor]]):
    """Images in [0, 1] of shape (1, 8, 8), and labels."""

    def __init__(self, *, train: bool) -> None:
        digits = load_digits()
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
        chosen = order[TEST_SAMPLES:] if train else order[:TEST_SAMPLES]
        self.images = torch.tensor(digits.images, dtype=torch.float32)[chosen].unsqueeze(1) / 16
        self.labels = torch.tensor(digits.target)[chosen]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def accuracy(found: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(axis=1) == found.label_ids).mean())}


torch.manual_seed(0)
model = ViTForImageClassification(
    ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        num_labels=10,
    )
)
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="runs/trainer",
        per_device_train_batch_size=32,
        learning_rate=2e-3,
        num_train_epochs=8,
        warmup_steps=20,
        logging_steps=20,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=Digits(train=True),
    eval_dataset=Digits(train=False),
    compute_metrics=accuracy,
)
trainer.train()
