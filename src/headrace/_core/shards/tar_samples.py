"""Samples from the members of a tar, by WebDataset's convention, checked strictly."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace._core.shards.reading import Decoder
from headrace._core.shards.tar_format import MEMBER_LIMIT, Member, TarParser
from headrace._core.streams.resumable import State, expect
from headrace.errors import ShardError

if TYPE_CHECKING:
    from typing_extensions import Buffer

# WebDataset's rule: the key is the path up to the first dot of the file name, the field is the rest after the dot.
_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)")


def split_name(name: str) -> tuple[str, str] | None:
    """Key and field of a member's name; None if the file name has no dot or starts with one.

    Example:
        >>> split_name("train.v1/0001.seg.PNG")
        ('train.v1/0001', 'seg.png')
        >>> split_name("README")
    """
    match = _NAME.fullmatch(name)
    return (match[1], match[2].lower()) if match else None


class SampleMembers(NamedTuple):
    """The members of one sample, by field, in the order of the archive."""

    key: str
    members: dict[str, Member]


class SampleGrouper:
    """Groups consecutive members with the same key; refuses missing and repeated fields and repeated keys.

    Every sample must have `fields`, and may have others; without them, unless `uniform` is False, exactly the fields of
    the archive's first.
    """

    def __init__(self, shard: str, *, fields: Collection[str] | None, uniform: bool) -> None:
        self._shard = shard
        self._required = None if fields is None else frozenset(fields)
        self._exact = fields is None and uniform
        self._key = ""
        self._prefix = "/"  # of names with the current key; no name starts with a slash
        self._members: dict[str, Member] = {}
        self._seen: set[str] = set()

    @property
    def learned(self) -> list[str] | None:
        """The fields of the first sample, which all others must have; None if they are given or may differ."""
        return sorted(self._required) if self._exact and self._required is not None else None

    def restore(self, learned: Collection[str] | None) -> None:
        """Group the members of an archive from a later sample on; repeated keys are found from there on."""
        if self._exact and learned is not None:
            self._required = frozenset(learned)

    def add(self, member: Member) -> SampleMembers | None:
        """Add the next member; returns the sample before it, if `member` starts a new one.

        Raises:
            ShardError: a repeated field, a repeated key, or a missing field in the sample before.
        """
        name = member.name
        if name.startswith(self._prefix) and "/" not in (rest := name[len(self._prefix) :]) and rest:
            key, field = self._key, rest.lower()  # the result of `split_name`, in a third of its time
        elif (split := split_name(name)) is not None:
            key, field = split
        else:
            return None
        complete = None
        if key != self._key:
            complete = self.finish()
            if key in self._seen:
                self._fail(f"sample {key!r} appears again; members of one sample must be consecutive", member)
            self._seen.add(key)
            self._key, self._prefix = key, f"{key}."
        elif field in self._members:
            self._fail(f"sample {key!r} has field {field!r} twice", member)
        self._members[field] = member
        return complete

    def finish(self) -> SampleMembers | None:
        """Return the current sample as complete; None if there is none. Raises as `add`."""
        if not self._members:
            return None
        sample = SampleMembers(self._key, self._members)
        self._key, self._prefix, self._members = "", "/", {}
        if self._required is None and self._exact:
            self._required = frozenset(sample.members)
        if self._required is not None and self._required != sample.members.keys():
            missing = self._required - sample.members.keys()
            extra = sample.members.keys() - self._required if self._exact else frozenset[str]()
            if missing or extra:
                self._refuse(sample, missing, extra)
        return sample

    def _refuse(self, sample: SampleMembers, missing: Collection[str], extra: Collection[str]) -> None:
        listed = ", ".join(sorted(map(repr, missing or extra)))
        what = f"lacks {listed}" if missing else f"has {listed}, which earlier samples lack"
        remedy = "; if that is intended, give fields=[...] or uniform=False" if self._exact else ""
        self._fail(f"sample {sample.key!r} {what}{remedy}", next(reversed(sample.members.values())))

    def _fail(self, what: str, member: Member) -> None:
        raise ShardError(what, shard=self._shard, member=member.name, offset=member.offset)


class TarSamples(Decoder):
    """Decoder of one archive: yields its samples as dicts.

    A position is after the last complete sample, with the fields that all samples must have.
    """

    def __init__(
        self, shard: str, *, fields: Collection[str] | None, uniform: bool, member_limit: int = MEMBER_LIMIT
    ) -> None:
        self._shard = shard
        self._fields = None if fields is None else frozenset(fields)
        self._parser = TarParser(shard, wanted=self._wanted if fields is not None else None, member_limit=member_limit)
        self._grouper = SampleGrouper(shard, fields=fields, uniform=uniform)
        self._files = 0
        self._samples = 0
        self._offset = 0  # after the last complete sample

    def feed(self, data: Buffer) -> Iterator[dict[str, Any]]:
        last = None
        for member in self._parser.feed(data):
            self._files += 1
            sample = self._grouper.add(member)
            if sample is not None:
                last = sample
                yield self._sample(sample)
        if last is not None:
            self._offset = next(reversed(last.members.values())).end

    def position(self) -> State:
        return {"offset": self._offset, "fields": self._grouper.learned}

    def restore(self, position: State) -> None:
        self._offset = expect(position, "offset", int)
        self._parser.start_at(self._offset)
        if position.get("fields") is not None:
            self._grouper.restore([str(field) for field in expect(position, "fields", list)])
        self._samples = 1 if self._offset else 0  # before it there is a sample, so that the archive has one

    def finish(self) -> Iterator[dict[str, Any]]:
        self._parser.finish()
        sample = self._grouper.finish()
        if sample is not None:
            yield self._sample(sample)
        if self._files and not self._samples:
            what = f"none of its {self._files} files has a name with an extension, so it has no samples"
            raise ShardError(what, shard=self._shard)

    def _wanted(self, name: str) -> bool:
        split = split_name(name)
        return split is not None and (self._fields is None or split[1] in self._fields)

    def _sample(self, sample: SampleMembers) -> dict[str, Any]:
        self._samples += 1
        fields: dict[str, Any] = {"__key__": sample.key, "__url__": self._shard}
        for field, member in sample.members.items():
            if member.data is not None:
                fields[field] = member.data
        return fields
