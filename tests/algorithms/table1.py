# SPDX-License-Identifier: Apache-2.0
"""Parameters of ResNet-18 that a client trains and sends, counted by hand, beside Table 1 of the PerAda paper."""

from itertools import pairwise

FULL = 11_181_642
CONV1 = 3 * 64 * 7 * 7
HEAD = 512 * 10 + 10
WIDTHS = (64, 128, 256, 512)
NORMS = 2 * (WIDTHS[0] + 4 * sum(WIDTHS) + sum(WIDTHS[1:]))  # the stem, four in each stage, three shortcuts
ADAPTERS = 4 * sum(width * width + 2 * width for width in WIDTHS)
PERADA = 1_413_258
DOWNS = 8 * 9 * (4 * WIDTHS[0] + sum(before + 3 * own for before, own in pairwise(WIDTHS)))  # of rank 8, 3 × 3
UPS = 8 * 4 * sum(WIDTHS)
TABLE = {  # trained, sent; what the paper prints
    "standalone": (FULL, 0, 11.18, 0),
    "fedavg": (FULL, FULL, None, None),
    "fedprox": (FULL, FULL, None, None),
    "feddyn": (FULL, FULL, None, None),
    "scaffold": (FULL, 2 * FULL, None, None),
    "moon": (FULL, FULL, None, None),
    "feddf": (FULL, FULL, None, None),
    "fedbe": (FULL, FULL, None, None),
    "fedbe_no_kd": (FULL, FULL, None, None),
    "fed_ensemble": (FULL, FULL, None, None),
    "fedavg_ft": (FULL, FULL, 11.18, 11.18),
    "fedbabu": (FULL - HEAD, FULL - HEAD, None, None),
    "mtl": (FULL, FULL, 11.18, 11.18),
    "pfedme": (2 * FULL, FULL, 22.36, 11.18),
    "apfl": (2 * FULL, FULL, 22.36, 11.18),
    "ditto": (2 * FULL, FULL, 22.36, 11.18),
    "fedbn": (FULL, FULL - NORMS, 11.18, 11.17),
    "lg_fedavg": (FULL, HEAD, 11.18, 0.005),
    "fedper": (FULL, FULL - HEAD, 11.18, 11.17),
    "fedrod": (FULL + HEAD, FULL, None, None),
    "fedrep": (FULL, FULL - HEAD, 11.18, 11.17),
    "fedalt_output": (FULL, FULL - HEAD, 11.18, 11.17),
    "fedsim_output": (FULL, FULL - HEAD, 11.18, 11.17),
    "fedalt_input": (FULL, FULL - CONV1, 11.18, None),
    "fedsim_input": (FULL, FULL - CONV1, 11.18, None),
    "fedalt_adapter": (FULL + ADAPTERS, FULL, 12.59, 11.18),
    "fedsim_adapter": (FULL + ADAPTERS, FULL, 12.59, 11.18),
    "perada": (2 * PERADA, PERADA, 2.82, 1.41),
    "perada_no_kd": (2 * PERADA, PERADA, 2.82, 1.41),
    "ffa_lora": (UPS + HEAD, UPS + HEAD, None, None),
    "fedsa_lora": (DOWNS + UPS + HEAD, DOWNS, None, None),
    "rolora": (UPS + HEAD, UPS + HEAD, None, None),  # in the first round
    "feddpa": (2 * (DOWNS + UPS + HEAD), DOWNS + UPS + HEAD, None, None),
    "feddpa_f": (DOWNS + UPS + HEAD, DOWNS + UPS + HEAD, None, None),
    "fedalt_row": (DOWNS + UPS + HEAD, DOWNS + UPS, None, None),  # without a gate
    "het_lora": (DOWNS + UPS + HEAD, DOWNS + UPS + HEAD, None, None),  # of a client with the adapter's rank
    "fedex_lora": (DOWNS + UPS + HEAD, DOWNS + UPS + HEAD, None, None),
    "flora": (DOWNS + UPS + HEAD, DOWNS + UPS + HEAD, None, None),
}
