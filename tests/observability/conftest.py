from tests.gateway.conftest import pytest_asyncio_loop_factories as pytest_asyncio_loop_factories
from tests.gateway.conftest import start as start
