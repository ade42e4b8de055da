"""
Imbalanced classes
==================

A class that is 4 % of the data, drawn as often as the other by `WeightedRandomSampler`, and its
effect on a model.

A torch program with one line changed: `from headrace import DataLoader`.
"""

import torch
from torch.utils.data import Dataset, WeightedRandomSampler

from headrace import DataLoader


class Transactions(Dataset):
    """Honest ones (0) and frauds (1) as points in the plane; the two overlap."""

    def __init__(self, honest, frauds, seed):
        random = torch.Generator().manual_seed(seed)
        near, far = (
            torch.randn(honest, 2, generator=random),
            torch.randn(frauds, 2, generator=random) + 1.5,
        )
        self.points = torch.cat([near, far])
        self.labels = torch.cat(
            [torch.zeros(honest, dtype=torch.long), torch.ones(frauds, dtype=torch.long)]
        )

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.points[index], self.labels[index]


def train(loader):
    """Three epochs of logistic regression; returns the model and the share of frauds among its samples."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    drawn = torch.zeros(2)
    for _ in range(3):
        for points, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(points), labels).backward()
            optimizer.step()
            drawn += labels.bincount(minlength=2)
    return model, drawn[1] / drawn.sum()


def main():
    torch.manual_seed(7)
    training = Transactions(honest=4800, frauds=200, seed=1)
    unseen = Transactions(honest=4800, frauds=200, seed=2)
    # of each sample: rarer class, larger weight
    weights = 1 / training.labels.bincount()[training.labels]
    sampler = WeightedRandomSampler(weights, num_samples=len(training), replacement=True)
    loaders = {
        "shuffled": DataLoader(training, batch_size=100, shuffle=True, num_workers=2),
        "weighted": DataLoader(training, batch_size=100, sampler=sampler, num_workers=2),
    }
    print(
        f"{len(training)} transactions, {training.labels.float().mean():.0%} of them frauds"
    )
    print("loader     frauds drawn   frauds found   false alarms")
    for name, loader in loaders.items():
        model, share = train(loader)
        alarms = model(unseen.points).argmax(dim=1)
        found, false = (alarms[unseen.labels == label].float().mean() for label in (1, 0))
        print(f"{name:10} {share:12.1%}   {found:12.0%}   {false:12.0%}")
    assert 0.48 < share < 0.52  # 15,000 draws: the deviation is 0.4 %


if __name__ == "__main__":
    main()
