# SPDX-License-Identifier: Apache-2.0
"""Measurements of speed (`tessera bench`), of quality (`tessera eval`, `tessera calibrate`) and of devices."""
