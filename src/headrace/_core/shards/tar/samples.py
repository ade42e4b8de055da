"""From the members of a tar to samples: WebDataset's convention, kept strictly."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace._core.shards.tar.format import MEMBER_LIMIT, Member, TarParser
from headrace.errors import ShardError

if TYPE_CHECKING:
    from typing_extensions import Buffer

# WebDataset's rule: the key is the path up to the first dot of the file's name, the field is what is behind it.
_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)")


def split_name(name: str) -> tuple[str, str] | None:
    """The key and the field of a member's name; None for a name without a dot, or one that begins with it.

    Example:
        >>> split_name("train.v1/0001.seg.PNG")
        ('train.v1/0001', 'seg.png')
        >>> split_name("README")
    """
    match = _NAME.fullmatch(name)
    return (match[1], match[2].lower()) if match else None


class SampleMembers(NamedTuple):
    """The members of one sample.

    Attributes:
        key: the sample's.
        members: by field, in the archive's order.
    """

    key: str
    members: dict[str, Member]


class SampleGrouper:
    """Groups members that stand together and have the same key; checks that none is missing and none comes twice.

    Args:
        shard: what errors call the archive.
        fields: the fields that every sample must have, beside which it may have others. None: each sample must have
            those of the archive's first, neither more nor less.
        uniform: with False and without `fields`, each sample has what it has.
    """

    def __init__(self, shard: str, *, fields: Collection[str] | None, uniform: bool) -> None:
        self._shard = shard
        self._required = None if fields is None else frozenset(fields)
        self._exactly = fields is None and uniform
        self._key = ""
        self._beginning = "/"  # of the names that belong to the key; no name begins so
        self._group: dict[str, Member] = {}
        self._seen: set[str] = set()

    def add(self, member: Member) -> SampleMembers | None:
        """Take in the next member; gives the group before it, if that is complete now.

        Raises:
            ShardError: a field comes twice, a key comes again, or the group before lacks a field.
        """
        name = member.name
        if name.startswith(self._beginning) and "/" not in (rest := name[len(self._beginning) :]) and rest:
            key, field = self._key, rest.lower()  # as `split_name` has it, in a third of its time
        elif (split := split_name(name)) is not None:
            key, field = split
        else:
            return None
        complete = None
        if key != self._key:
            complete = self.finish()
            if key in self._seen:
                self._fail(f"sample {key!r} comes again; members of one sample must stand together", member)
            self._seen.add(key)
            self._key, self._beginning = key, f"{key}."
        elif field in self._group:
            self._fail(f"sample {key!r} has field {field!r} twice", member)
        self._group[field] = member
        return complete

    def finish(self) -> SampleMembers | None:
        """The group that is complete because nothing more comes; None if there is none.

        Raises:
            ShardError: it lacks a field.
        """
        if not self._group:
            return None
        group = SampleMembers(self._key, self._group)
        self._key, self._beginning, self._group = "", "/", {}
        if self._required is None and self._exactly:
            self._required = frozenset(group.members)
        if self._required is not None and self._required != group.members.keys():
            missing = self._required - group.members.keys()
            extra = group.members.keys() - self._required if self._exactly else frozenset[str]()
            if missing or extra:
                self._refuse(group, missing, extra)
        return group

    def _refuse(self, group: SampleMembers, missing: Collection[str], extra: Collection[str]) -> None:
        what = f"lacks {_listed(missing)}" if missing else f"has {_listed(extra)}, which those before have not"
        remedy = "" if not self._exactly else "; where that is meant, say fields=[...] or uniform=False"
        self._fail(f"sample {group.key!r} {what}{remedy}", next(reversed(group.members.values())))

    def _fail(self, what: str, member: Member) -> None:
        raise ShardError(what, shard=self._shard, member=member.name, offset=member.offset)


class TarSamples:
    """Takes the bytes of one archive in any pieces, gives its samples, as dicts.

    Args:
        shard: what errors and ``"__url__"`` call the archive.
        fields: the fields to give; None for all.
        uniform: whether samples must have the same fields, where `fields` is None.
        member_limit: the largest member in bytes.
    """

    def __init__(
        self, shard: str, *, fields: Collection[str] | None, uniform: bool, member_limit: int = MEMBER_LIMIT
    ) -> None:
        self._shard = shard
        self._fields = None if fields is None else frozenset(fields)
        self._parser = TarParser(shard, wanted=self._wanted if fields is not None else None, member_limit=member_limit)
        self._grouping = SampleGrouper(shard, fields=fields, uniform=uniform)
        self._files = 0
        self._samples = 0

    def feed(self, data: Buffer) -> Iterator[dict[str, Any]]:
        """Take the next bytes; gives the samples that are complete. Must be read to its end.

        Raises:
            ShardError: the archive, or the way its members are grouped, is damaged.
        """
        for member in self._parser.feed(data):
            self._files += 1
            group = self._grouping.add(member)
            if group is not None:
                yield self._sample(group)

    def finish(self) -> Iterator[dict[str, Any]]:
        """Say that there are no more bytes; gives the last sample.

        Raises:
            ShardError: the archive is cut short, or has files and none that is part of a sample.
        """
        self._parser.finish()
        group = self._grouping.finish()
        if group is not None:
            yield self._sample(group)
        if self._files and not self._samples:
            what = f"none of its {self._files} files has a name with an extension, so it has no samples"
            raise ShardError(what, shard=self._shard)

    def _wanted(self, name: str) -> bool:
        split = split_name(name)
        return split is not None and (self._fields is None or split[1] in self._fields)

    def _sample(self, group: SampleMembers) -> dict[str, Any]:
        self._samples += 1
        sample: dict[str, Any] = {"__key__": group.key, "__url__": self._shard}
        for field, member in group.members.items():
            if member.data is not None:
                sample[field] = member.data
        return sample


def _listed(fields: Collection[str]) -> str:
    return ", ".join(sorted(map(repr, fields)))
