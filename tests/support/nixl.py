# SPDX-License-Identifier: Apache-2.0
"""Servers beside NIXL."""

import json

from tests.support.in_place import IN_PLACE

NIXL = ("--kv-transfer-config", json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"}))
REMOTE = {"do_remote_decode": True, "do_remote_prefill": False}
PLACEMENTS = {"copy": (), "in-place": IN_PLACE}
