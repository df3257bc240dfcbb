# SPDX-License-Identifier: Apache-2.0
"""Documents in requests, of every endpoint's shape, and their options."""
