from perada.data.rounds import *  # noqa
from perada.data.rounds import CohortBatch, Phase, RoundPlan, EvalBatch
