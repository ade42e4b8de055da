"""
Bad samples
===========

Raised with their index and key, or skipped and listed.
"""

import warnings

import headrace as hr


class Rows(hr.AsyncDataset):
    rows = ("1", "2", "three", "4", "", "6")

    def __len__(self):
        return len(self.rows)

    async def aget(self, index):
        return self.rows[index]

    def sample_key(self, index):
        return f"row {index + 1}"


with hr.DataLoader(Rows(), batch_size=2, transform=int) as loader:
    batches = iter(loader)
    while True:
        try:
            print(next(batches).tolist())
        except StopIteration:
            break
        except ValueError as error:
            # The transform's own error; iteration continues after it.
            print(f"{error}\n  {error.__notes__[-1]}")

# The first skipped sample of an epoch is a warning, which is printed here.
with (
    hr.DataLoader(Rows(), batch_size=2, transform=int, on_error="skip") as loader,
    warnings.catch_warnings(record=True) as caught,
):
    print([batch.tolist() for batch in loader])
    print(f"warning: {caught[0].message}")
    print(f"{loader.stats().skipped_samples} samples skipped:")
    for record in loader.stats().skipped:
        print(f"  {record}")
