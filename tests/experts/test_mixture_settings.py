import pytest

from shoal.core import UsageError
from shoal.experts.settings import MixtureSettings


def test_settings_one_by_one():
    settings = MixtureSettings(k_best=8).but(k_min=2)
    assert (settings.k_best, settings.k_min) == (8, 2)
    with pytest.raises(UsageError, match="Did you mean 'k_best'"):
        settings.but(k_bset=3)
    with pytest.raises(UsageError, match="do not go together"):
        MixtureSettings(k_best=2, k_min=3)
    with pytest.raises(UsageError, match="'raise' or 'zeros'"):
        MixtureSettings(when_none_answers="ignore")
