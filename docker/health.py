# SPDX-License-Identifier: Apache-2.0
"""Health check of the images: GET /health on a port of this container."""

import sys
from http import HTTPStatus
from http.client import HTTPConnection  # unlike urllib, it ignores proxies

connection = HTTPConnection("127.0.0.1", int(sys.argv[1]))
connection.request("GET", "/health")
status = connection.getresponse().status
sys.exit(0 if status == HTTPStatus.OK else f"GET /health: status {status}")
