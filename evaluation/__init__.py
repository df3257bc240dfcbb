# SPDX-License-Identifier: Apache-2.0
"""Accuracy and speed of full attention and of both ways of reuse, on questions with documents, over HTTP."""
