"""What training comes to when nothing disturbs it."""

import pytest

from tests.trainer.training import Training


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Training:
    training = Training(tmp_path_factory.mktemp("undisturbed") / "one")
    assert "right: 0.9" in training.run()
    return training


@pytest.fixture(scope="session")
def undisturbed_pair(tmp_path_factory: pytest.TempPathFactory) -> Training:
    training = Training(tmp_path_factory.mktemp("undisturbed") / "pair", ranks=2)
    training.run()
    return training
