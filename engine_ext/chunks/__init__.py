# SPDX-License-Identifier: Apache-2.0
"""The chunk cache in the app's process: fills, tiers, and transfers to workers."""
