# SPDX-License-Identifier: Apache-2.0
from perada.deploy.flower.app import client_app

app = client_app()
