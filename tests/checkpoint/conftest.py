"""Folders on every kind of store."""

import pytest

STORES = {"memory": "memory_folder", "s3": "s3_bucket", "azure": "azure_container", "sftp": "sftp_folder"}
FOLDERS = {"local": "tmp_path", **STORES}
"""Fixtures that give the path or URL of an empty folder, by the kind of store."""
DRIVEN = {"s3 by obstore": "obstore_s3", "azure by obstore": "obstore_azure"}
"""The same by obstore, which a fork cannot use."""


@pytest.fixture(params=[*FOLDERS, *DRIVEN])
def place(request: pytest.FixtureRequest) -> str:
    """Path or URL of a folder that is not there yet, on every kind of store."""
    return f"{request.getfixturevalue({**FOLDERS, **DRIVEN}[request.param])}/run"


@pytest.fixture(params=[store for store in FOLDERS if store != "memory"])
def shared_place(request: pytest.FixtureRequest) -> str:
    """The same on a store that several processes reach."""
    return f"{request.getfixturevalue(FOLDERS[request.param])}/run"
