"""The ``.idx`` files of DALI's tool `wds2idx` for tar shards."""

from __future__ import annotations

from headrace._shards.discovery import Shard
from headrace._shards.tar import TAR_BLOCK, TarSamples, safe_name, split_name
from headrace.errors import StoreError

MOST_ZEROS = 1 << 20  # bytes after the last sample: tar rounds the size of an archive up


async def sample_borders(shard: Shard) -> list[int]:
    """Return the borders of samples, from the ``.idx`` file.

    The list is empty without a file. The file must describe every byte of the shard: members
    follow each other without gaps, up to the zeros at the end. Extended headers are gaps: wds2idx
    writes wrong offsets for archives with extended headers. All samples must have the same fields.
    The last sample and the zeros are read, and compared with the file.

    Args:
        shard: the shard, of known version.

    Raises:
        ShardError: the end of the shard is damaged, or the file has an unsafe name.
        ValueError: the file does not describe the shard.
    """
    try:
        text = bytes(await shard.store.read_all(shard.key.removesuffix(".tar") + ".idx"))
    except StoreError:
        # Stores answer 404 or 403 for a file that does not exist. The shard is then scanned.
        return []
    first, *lines = text.decode().removesuffix("\n").split("\n")
    if not lines or first != f"v1.2 {len(lines)}":
        raise ValueError(f"the first line is {first[:99]!r}, and not 'v1.2 {len(lines)}'")
    end, borders, keys, fields = 0, [0], {""}, list[str]()
    for line in lines:
        words, members = line.split(" "), list[tuple[str, str]]()
        # For each member: extension, offset, size and name.
        for offset, size, name in zip(words[1::4], words[2::4], words[3::4], strict=True):
            if int(offset) != end + TAR_BLOCK:
                raise ValueError(f"the bytes from {end:,} to {offset} are not one header")
            end = int(offset) + int(size) + -int(size) % TAR_BLOCK
            members.append(split_name(safe_name(name, shard.name, end)) or ("", ""))
        key = members[0][0]
        fields = fields or sorted({field for _, field in members})
        if key in keys or sorted(members) != [(key, field) for field in fields]:
            raise ValueError(f"line {len(borders) + 1} is not a new sample with fields {fields}")
        keys.add(key)
        borders.append(end)
    if not 2 * TAR_BLOCK <= shard.size - end <= MOST_ZEROS:
        raise ValueError(f"samples end at byte {end:,}, and the shard at byte {shard.size:,}")
    data = await shard.read(borders[-2], shard.size)
    last = TarSamples(shard.name, uniform=False).whole_sample(data, borders[-2])
    if last["__key__"] != key:
        raise ValueError(f"the last sample is {last['__key__']!r}, and not {key!r}")
    return borders
