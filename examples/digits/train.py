"""The digits of job.py as a plain training script: Shardline is three added lines.

shardline train --script examples/digits/train.py --ps 2 --workers 2
"""

from __future__ import annotations

import math

import torch
from sklearn.datasets import load_digits
from torch import nn

import shardline

STEPS = 500
LEARNING_RATE = 0.05
BATCH_SIZE = 32
TEST_SAMPLES = 360

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
test, train = order[:TEST_SAMPLES], order[TEST_SAMPLES:]

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1, bias=False),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, padding=1, bias=False),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(32 * 4 * 4, 64),
    nn.ReLU(),
    nn.Dropout(0.25),
    nn.Linear(64, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9, weight_decay=5e-4)

session = shardline.connect()  # 1 of 3: joins the cluster that TF_CONFIG or `shardline train` names
optimizer = session.attach(model, optimizer)  # 2 of 3: the parameters are the servers' from here on

for step in session.steps(STEPS):  # 3 of 3: goes on at the job's step, also after a restart
    # Batch, dropout and learning rate are functions of step and replica, so that a restarted replica repeats them.
    torch.manual_seed(step * session.num_replicas + session.replica)
    optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 + math.cos(math.pi * step / STEPS)) / 2
    batch = train[torch.randint(len(train), (BATCH_SIZE,))]
    loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

model.eval()
with torch.no_grad():
    accuracy = (model(images[test]).argmax(dim=1) == labels[test]).double().mean()
print(f"replica {session.replica} of {session.num_replicas}: test accuracy {accuracy:.4f}")
session.close()
