from tests.gateway.conftest import pytest_asyncio_loop_factories, start

__all__ = ["pytest_asyncio_loop_factories", "start"]
