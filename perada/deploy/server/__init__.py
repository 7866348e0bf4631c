# SPDX-License-Identifier: Apache-2.0
"""The server of a deployed run."""

SERVER_STATE = "server.safetensors"
"""Name of the file with the server's states and the run's progress; here, since this file does not import torch."""
