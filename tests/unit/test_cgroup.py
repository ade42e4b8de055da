"""Cores and memory that the control groups of a container leave."""

from headrace._base.cgroup import CgroupLimits


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_limits_of_control_groups_version_2_are_the_tightest_of_all_parents(tmp_path):
    write(tmp_path / "root/job", cpu__max="200000 100000", memory__max="max")
    write(tmp_path / "root/job/inner", cpu__max="max 100000", memory__max=str(1 << 30))
    write(tmp_path, membership="0::/job/inner")
    limits = CgroupLimits.here(tmp_path / "root", tmp_path / "membership")
    assert limits == CgroupLimits(cores=2.0, memory=1 << 30)
    write(tmp_path, membership="1:memory:/")  # no control groups of version 2
    assert CgroupLimits.here(tmp_path / "root", tmp_path / "membership") == CgroupLimits()
    assert CgroupLimits.here(tmp_path / "absent", tmp_path / "absent") == CgroupLimits()
