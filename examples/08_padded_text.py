"""
Text of unequal length
======================

Sentences of unequal length: padded to a batch, packed for a recurrent network, with their lengths
and labels.

A torch program with one line changed: `from headrace import DataLoader`.
"""

import random

import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import Dataset

from headrace import DataLoader

PAD, NOT = 0, 1  # token numbers
WORDS = [
    "<pad>",
    "not",
    "good",
    "fine",
    "great",
    "bad",
    "poor",
    "awful",
    "the",
    "film",
    "was",
    "really",
    "and",
    "its",
    "music",
]
GOOD, BAD, FILLERS = range(2, 5), range(5, 8), range(8, len(WORDS))


class Reviews(Dataset):
    """Sentences about films as token numbers, and whether they are kind; "not" inverts the next word."""

    def __init__(self, count, seed):
        self.chance = random.Random(seed)
        self.rows = [self.write() for _ in range(count)]

    def write(self):
        kind, negated = self.chance.random() < 0.5, self.chance.random() < 0.5
        adjective = [self.chance.choice(GOOD if kind != negated else BAD)]
        before, after = (
            [self.chance.choice(FILLERS) for _ in range(self.chance.randint(0, 9))]
            for _ in range(2)
        )
        return before + [NOT] * negated + adjective + after, int(kind)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        tokens, label = self.rows[index]
        return torch.tensor(tokens), label


def padded(reviews):
    tokens, labels = zip(*reviews, strict=True)
    lengths = torch.tensor([len(each) for each in tokens])
    return (
        pad_sequence(tokens, batch_first=True, padding_value=PAD),
        lengths,
        torch.tensor(labels),
    )


class Reader(torch.nn.Module):
    """A GRU over the words, classified by its state after the last word (not after the padding)."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(len(WORDS), 8, padding_idx=PAD)
        self.read = torch.nn.GRU(8, 16, batch_first=True)
        self.classify = torch.nn.Linear(16, 2)

    def forward(self, tokens, lengths):
        packed = pack_padded_sequence(
            self.embed(tokens), lengths, batch_first=True, enforce_sorted=False
        )
        _, state = self.read(packed)
        return self.classify(state[0])


def main():
    torch.manual_seed(0)
    training = DataLoader(
        Reviews(2000, seed=1),
        batch_size=50,
        shuffle=True,
        num_workers=2,
        collate_fn=padded,
    )
    unseen = DataLoader(
        Reviews(500, seed=2), batch_size=50, num_workers=2, collate_fn=padded
    )
    tokens, lengths, labels = next(iter(unseen))
    print(
        f"a batch: tokens {[*tokens.shape]}, lengths {[*lengths.shape]}, labels {[*labels.shape]}; three of its rows:"
    )
    for row, length, label in zip(tokens[:3], lengths, labels, strict=False):
        print(
            f"  {length:2} words, {'kind' if label else 'unkind':6}:",
            *(WORDS[token] for token in row),
        )
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        for tokens, lengths, labels in training:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(tokens, lengths), labels).backward()
            optimizer.step()
        with torch.no_grad():
            right = sum(
                (model(tokens, lengths).argmax(dim=1) == labels).sum().item()
                for tokens, lengths, labels in unseen
            )
        print(
            f"epoch {epoch}: {right / len(unseen.dataset):.0%} of unseen reviews understood"
        )


if __name__ == "__main__":
    main()
