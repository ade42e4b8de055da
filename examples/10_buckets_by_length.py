"""
Buckets by length
=================

Sentences of similar length in one batch: a custom batch sampler, and the padding it saves.

A torch program with one line changed: `from headrace import DataLoader`.
"""

import random

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, Sampler

from headrace import DataLoader

BATCH = 32


class Sentences(Dataset):
    """Token numbers; most sentences are short, a few are long, as in any corpus."""

    def __init__(self, count):
        chance = random.Random(0)
        self.lengths = [
            1 + min(199, int(chance.lognormvariate(3, 0.8))) for _ in range(count)
        ]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.full((self.lengths[index],), index)


def padded(sentences):
    return pad_sequence(sentences, batch_first=True), torch.tensor(
        [len(each) for each in sentences]
    )


class BucketSampler(Sampler):
    """Random batches of similar length: sorts the shuffled samples of `pool` batches at a time by length.

    Sorting everything would save a little more, and would show the model the same batches in every
    epoch."""

    def __init__(self, lengths, batch_size, pool=25):
        self.lengths, self.batch_size, self.pool = lengths, batch_size, pool

    def __len__(self):
        return -(-len(self.lengths) // self.batch_size)

    def __iter__(self):
        order = torch.randperm(len(self.lengths)).tolist()
        size = self.pool * self.batch_size
        pools = (
            sorted(order[at : at + size], key=self.lengths.__getitem__)
            for at in range(0, len(order), size)
        )
        batches = [
            pool[at : at + self.batch_size]
            for pool in pools
            for at in range(0, len(pool), self.batch_size)
        ]
        # short and long ones mixed
        return iter([batches[number] for number in torch.randperm(len(batches))])


def show(name, loader):
    """Read an epoch; print how much of it is padding, and check that every sentence was delivered once."""
    longest, padded, real, seen = [], 0, 0, []
    for tokens, lengths in loader:
        longest.append(tokens.shape[1])
        padded += tokens.numel()
        real += lengths.sum().item()
        seen += tokens[:, 0].tolist()  # a sentence's tokens are its index
    assert sorted(seen) == list(range(len(loader.dataset)))
    share = 1 - real / padded
    print(
        f"{name}: {padded:,} tokens, {share:.0%} of them padding; the first batches are {longest[:6]} tokens long"
    )
    return padded


def main():
    torch.manual_seed(0)
    sentences = Sentences(5000)
    buckets = BucketSampler(sentences.lengths, BATCH)
    print(
        f"{len(sentences)} sentences of 1 to {max(sentences.lengths)} tokens, {sum(sentences.lengths):,} in all"
    )
    plain = show(
        "shuffled",
        DataLoader(sentences, BATCH, shuffle=True, num_workers=2, collate_fn=padded),
    )
    like = show(
        "bucketed",
        DataLoader(sentences, batch_sampler=buckets, num_workers=2, collate_fn=padded),
    )
    print(f"the model reads {plain / like:.1f} times less")


if __name__ == "__main__":
    main()
