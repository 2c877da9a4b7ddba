from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "code",
    [
        "import convert; assert callable(convert.verify)",
        "from convert.verify import VerifyResult; import convert; assert callable(convert.verify)",
        "import convert.verify; assert callable(convert.verify)",
        "from convert import verify; import convert.verify; assert callable(verify) and verify is convert.verify",
        "import convert; convert.verify; from convert.verify import VerifyResult; assert callable(convert.verify)",
        "import convert.errors, sys; assert convert.errors.Problem; assert 'torch' not in sys.modules",
    ],
)
def test_a_function_is_not_hidden_by_the_module_of_its_name(code):
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
