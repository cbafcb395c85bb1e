"""Which failures a copy survives: only those that are certain."""

import pytest

from shardckpt.errors import StorageError, UsageError
from shardckpt.native.step_copies import (
    Durability,
    StepCopy,
    find_file_system,
    find_survived,
    require_durable,
)

MOUNTS = """\
22 1 0:21 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:26 / /mnt/shared rw shared:9 - nfs4 server:/export rw
31 30 0:27 / /mnt/shared/local\\040disk rw - xfs /dev/nvme0n1 rw
32 22 0:28 / /dev/shm rw - tmpfs tmpfs rw
34 22 0:30 / /mnt/c rw - 9p C:\\ rw
33 22 0:29 / /lustre rw - lustre mds:/fs rw
junk
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/home/run", "ext4"),
        ("/mnt/shared", "nfs4"),
        ("/mnt/shared/run", "nfs4"),
        ("/mnt/sharedrun", "ext4"),
        ("/mnt/shared/local disk/run", "xfs"),
        ("/dev/shm/run", "tmpfs"),
    ],
)
def test_the_file_system_of_a_path_is_that_of_the_longest_mount_above_it(path, kind):
    assert find_file_system(path, MOUNTS) == kind


@pytest.mark.parametrize(
    ("url", "survives"),
    [
        ("/nowhere/run", {"process"}),
        ("/lustre/run", {"process", "node", "2 nodes"}),
        ("/mnt/c/run", {"process"}),
        ("s3://bucket/run", {"process", "node", "2 nodes"}),
        ("gs://bucket/run", {"process", "node", "2 nodes"}),
        ("memory://run", set()),
        ("odd://run", {"process"}),
    ],
)
def test_a_copy_claims_only_what_is_certain(url, survives):
    assert set(find_survived(url, MOUNTS)) == survives
    assert set(find_survived(url, "")) == (survives - {"node", "2 nodes"} if url.startswith("/") else survives)


def test_a_step_survives_what_one_of_its_copies_survives():
    near, far = StepCopy("memory", "a", ("process",), None), StepCopy("root", "b", ("process", "node"), 1.0)
    assert Durability(3, ()).survives == set()
    assert Durability(3, (near,)).survives == {"process"}
    assert Durability(3, (near, far)).survives == {"process", "node"}
    require_durable(Durability(3, (near, far)), "node")
    with pytest.raises(StorageError, match="step 3 does not survive losing the node; found a"):
        require_durable(Durability(3, (near,)), "node")
    with pytest.raises(StorageError, match="does not survive losing 2 nodes"):
        require_durable(Durability(3, (near, far)), "2 nodes")
    with pytest.raises(UsageError, match="galaxy"):
        require_durable(Durability(3, (near,)), "galaxy")
