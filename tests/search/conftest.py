import threading

import pytest
from stand_in import Service


@pytest.fixture
def service():
    with Service() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
