# SPDX-License-Identifier: Apache-2.0
"""Export one model of a run to a file for other programs, and compare its logits with the run's."""

import copy
import json
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.export import Dim

from perada.core.checks import OptionError, check_choice, installed
from perada.core.states import State, images_dtype
from perada.data.sets.arrays import Photographs
from perada.engine.precision import tolerance_of
from perada.federation.options import Prediction
from perada.results import monai_bundle
from perada.results.both_network import BothModelsNetwork
from perada.results.cards import privacy_card, render_template
from perada.results.clients import joined_clients
from perada.results.models import ChosenPrediction, Ensemble, both_predictor, chosen_prediction, preprocessing_for
from perada.results.overwriting import check_exported_model
from perada.results.predictors import BatchOutputs, in_dtype_of
from perada.results.run import Run
from perada.results.run_file import together
from perada.scores.accumulation import finite_outputs
from perada.scores.failed_outputs import REMEDY, FailedOutputsError
from perada.tasks.base import make_task

Format = Literal["onnx", "safetensors", "torch-export", "monai"]
FILES: dict[Format, str] = {
    "onnx": "model.onnx",
    "safetensors": "model.safetensors",
    "torch-export": "model.pt2",
    "monai": monai_bundle.MODEL_FILE,
}
"""The file of the model, in the folder of the export."""
TOLERANCE = 1e-4
"""Largest difference of logits between the file and the run, relative to the largest logit, in single precision."""
_ReadModel = Callable[[Tensor], Tensor | tuple[Tensor, ...]]
"""A model that was read from a file: it maps images to logits, and with both models of a client to a mask, too."""
_ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def export_model(
    run: Run, client: int | str | None, form: Format, folder: Path, prediction: Prediction | None = None
) -> str:
    """Write a client's model, both of its models as one, or the global one, with its preprocessing and a README.

    The format ``monai`` is a MONAI bundle: an ONNX file, the metadata, and the configuration of an inference.

    If PEFT can merge the adapter into the backbone's weights, it is merged. The file is read again, and its logits
    on photographs are compared with the run's. Existing files in ``folder`` are kept until both files are written.

    Args:
        run: The run.
        client: Number or name of the client; None for the global model.
        form: The format.
        folder: Folder of the file and the README.
        prediction: Models with which the client predicts: ``personal``, ``global`` or ``both``; by default those of the
            option ``evaluation.prediction`` of the run.

    Returns:
        A sentence on the adapter, and one on the largest difference of the logits.

    Raises:
        FileExistsError: If a file would be replaced that perada did not write.
        ModuleNotFoundError: If a package of the format is not installed.
        OSError: If the files cannot be written.
        ValueError: If the client does not exist, the model cannot be exported, the logits differ, or they are NaN or
            infinite (a :class:`.FailedOutputsError`).
    """
    check_choice("format", form, list(FILES))
    check_choice("prediction", prediction, [None, *get_args(Prediction)])
    readme = "README.md"
    files: tuple[str, ...] = (FILES[form],)
    if form == "monai":
        readme = monai_bundle.README_FILE
        files = monai_bundle.BUNDLE_FILES
    check_exported_model(folder, files, readme)
    if form in ("onnx", "monai"):
        for package in _ONNX_PACKAGES:
            installed(package, f"format={form}", "onnx")
    number = None if client is None else run.number(client)
    chosen = _choose_models(run, client, form, prediction)
    exported = _find_exported(run, number, chosen)
    samples = in_dtype_of(exported.run_model, _sample_images(run))
    metadata = {
        "preprocessing": json.dumps(preprocessing_for(run, client).record()),
        "classes": json.dumps(run.info.get("classes")),
        "task": json.dumps(run.info["task"]),
        "client": json.dumps(client),
        "backbone": json.dumps(run.info["backbone"]),
    }
    with torch.no_grad(), together(folder) as stage:
        for name in (*files, readme):
            (stage / name).parent.mkdir(exist_ok=True)
        if form == "monai":
            monai_bundle.write_bundle_files(stage, _bundle_facts(run, client, chosen))
        for variant in exported.variants(samples):
            variant.model.requires_grad_(False)
            expected = variant.run_outputs(samples)
            num_failed = int((~finite_outputs(expected.logits)).sum())
            if num_failed:
                # No file could be compared with the run.
                raise FailedOutputsError(
                    f"{str(folder / FILES[form])!r} was not written, because outputs of "
                    f"{'the global model' if client is None else f'the model of client {client!r}'} are NaN or "
                    f"infinite for {num_failed} of {len(samples)} samples; {REMEDY}"
                )
            read_outputs = _write_and_read(form, variant.model, samples, stage / FILES[form], metadata)
            difference = _largest_difference(read_outputs, expected)
            # False if the difference is NaN.
            limit = tolerance_of(exported.run_model, TOLERANCE) * float(expected.logits.abs().max())
            is_close = difference <= limit
            if not is_close:
                raise ValueError(
                    f"{str(folder / FILES[form])!r} was not written, because its logits would differ from the run's by "
                    f"{difference:.1e}, more than {limit:.1e}; choose a different format"
                )
        description = exported.description
        if chosen.prediction == "personal" and prediction is None and run.info.get("prediction") == "both":
            description += " It is the client's personal model only."
        summary = (
            f"{description} Its logits on {len(samples)} samples differ from the run's by at most {difference:.1e}."
        )
        text = _format_readme(run, client, number, form, chosen, summary)
        (stage / readme).write_text(f"{text}\n", encoding="utf-8")
    return summary


def _bundle_facts(run: Run, client: int | str | None, chosen: ChosenPrediction) -> monai_bundle.BundleFacts:
    """Return what a MONAI bundle states about an exported model; see :func:`_format_readme`."""
    names = run.info.get("classes") or [str(number) for number in range(run.info["num_classes"])]
    models = {
        "global": "global model",
        "personal": f"personal model of client {client}",
        "both": f"personal and global model of client {client}",
    }
    title = models[chosen.prediction]
    backbone = run.info["backbone"] or "a network of the user"
    return monai_bundle.BundleFacts(
        preprocessing=preprocessing_for(run, client),
        task=make_task(run.info["task"]),
        outputs=tuple(names),
        title=f"The {title} of a run of perada",
        description=f"The {title} of federated training by {run.info['algorithm']} on {backbone}.",
    )


def _choose_models(run: Run, client: int | str | None, form: Format, prediction: Prediction | None) -> ChosenPrediction:
    """Return which models of a client are exported: the personal one if the format cannot hold both.

    Raises:
        OptionError: If both are asked for, and the run or the format cannot have them.
    """
    if form != "safetensors":
        return chosen_prediction(run, client, prediction)
    if prediction == "both":
        raise OptionError(
            "prediction='both' is not supported with format='safetensors', which holds the tensors of one network; "
            "choose the format onnx, monai, torch-export or peft",
            name="prediction",
            value="both",
        )
    if prediction is None and client is not None and run.info.get("prediction") != "global":
        prediction = "personal"
    return chosen_prediction(run, client, prediction)


def _largest_difference(batch_outputs: BatchOutputs, expected: BatchOutputs) -> float:
    """Return the largest difference of logits; infinity if not the same images are typical."""
    if expected.typical is not None:
        assert batch_outputs.typical is not None
        if not torch.equal(batch_outputs.typical, expected.typical):
            return math.inf
    return float((batch_outputs.logits - expected.logits).abs().max())


def _write_and_read(
    form: Format, model: nn.Module, samples: Tensor, path: Path, metadata: dict[str, str]
) -> BatchOutputs:
    """Write a model to a file, and return the outputs of the model that is read from it.

    Raises:
        OSError: If the file cannot be written.
        ValueError: If the model cannot be exported.
    """
    writers = {
        "onnx": _write_onnx,
        "safetensors": _write_safetensors,
        "torch-export": _write_torch_export,
        "monai": _write_onnx,
    }
    try:
        read_model = writers[form](model, samples, path, metadata)
        outputs = read_model(samples)
    except OSError:
        # An error of the disk, which no other format avoids.
        raise
    except Exception as error:  # exporters raise errors without a common type
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(
            f"the model cannot be exported as {form} ({reason}); choose a different format, or use Run.save"
        ) from error
    return BatchOutputs(*outputs) if isinstance(outputs, tuple) else BatchOutputs(outputs)


def _format_readme(
    run: Run, client: int | str | None, number: int | None, form: Format, chosen: ChosenPrediction, summary: str
) -> str:
    """Return the README of an exported model.

    Args:
        run: The run.
        client: The client, as it was requested; None for the global model.
        number: Number of the client.
        form: The format.
        chosen: The models of the client.
        summary: What is said of the adapter and the logits.
    """
    private_client = number if number in run.own_clients() else None
    preprocessing = preprocessing_for(run, client).record() | {"classes": run.info.get("classes")}
    return render_template(
        "model",
        form=form,
        client=client,
        prediction=chosen.prediction,
        files_of_images=monai_bundle.reads_image_files(run.preprocessing),
        info=run.info,
        shape=run.preprocessing.shape,
        summary=summary,
        prepared=json.dumps(preprocessing, indent=2),
        privacy=privacy_card(run.info.get("privacy"), private_client, joined_clients(run.info)),
    )


def _sample_images(run: Run) -> Tensor:
    """Return eight prepared crops of scikit-learn's photographs, or noise if the run had prepared images."""
    preprocessing = run.preprocessing
    if preprocessing.kind == "uint8" and preprocessing.channels in (1, 3):
        photographs = Photographs(8, size=64, gray=preprocessing.channels == 1).images
        assert photographs is not None
        return preprocessing.batch(list(photographs))
    if preprocessing.kind == "tokens":
        raise ValueError("a run on texts cannot be exported to this format; save its adapters with Run.save")
    return torch.randn(8, *preprocessing.shape, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class _Variant:
    """A network to write.

    Attributes:
        model: The network.
        run_outputs: Returns the run's own outputs for images, which those of the network are compared with.
    """

    model: nn.Module
    run_outputs: Callable[[Tensor], BatchOutputs]


@dataclass(frozen=True)
class _Exported:
    """What is exported of a run.

    Attributes:
        run_model: The model, or the personal one of both, as the run predicts with it.
        variants: Returns the networks to write and compare, given the samples. The last one is kept.
        description: A sentence on the adapter.
    """

    run_model: nn.Module
    variants: Callable[[Tensor], list[_Variant]]
    description: str


def _find_exported(run: Run, client: int | None, chosen: ChosenPrediction) -> _Exported:
    """Return what is exported of a run: the chosen models of a client, or the global one (None)."""
    if chosen.state_of_both is not None:
        assert client is not None
        return _both_models(run, client, chosen.state_of_both)
    if client is None or chosen.prediction == "global":
        client = None
        run_model = run.global_model()
    else:
        run_model = run.personal(client)
    merged = _merge_adapter(run, run_model, client)
    variant = _Variant(merged.model, lambda images: BatchOutputs(run_model(images)))
    return _Exported(run_model, lambda samples: [variant], merged.description)


def _both_models(run: Run, client: int, state_of_both: State) -> _Exported:
    """Return the prediction with both models of a client as one network.

    Few samples, or none, look like the client's images, so the personal model would hardly be compared. The network is
    therefore also written with a threshold for which half of the samples are typical.
    """
    task = make_task(run.info["task"])
    personal = run.personal(client)

    def variant(state: State) -> _Variant:
        predictor = both_predictor(run, client, state, torch.device("cpu"))
        network = BothModelsNetwork(run.personal(client), run.global_model(), state, predictor.compared_maps, task)

        def run_outputs(images: Tensor) -> BatchOutputs:
            outputs = predictor(images)
            logits = outputs.logits.movedim(-1, 1) if task.per_pixel else outputs.logits
            return BatchOutputs(logits, outputs.typical)

        return _Variant(network.eval(), run_outputs)

    def variants(samples: Tensor) -> list[_Variant]:
        if int(state_of_both["neighbors"]) == 0:
            return [variant(state_of_both)]
        distances = both_predictor(run, client, state_of_both, torch.device("cpu")).distances(samples)
        state_for_half = state_of_both | {"threshold": distances.quantile(0.5)}
        return [variant(state_for_half), variant(state_of_both)]

    return _Exported(
        personal,
        variants,
        "It predicts with the client's personal and the global model together, whose adapters are kept as layers.",
    )


@dataclass(frozen=True)
class _Merged:
    """A model to export.

    Attributes:
        model: The model, with its adapter merged if possible.
        description: A sentence on the adapter.
    """

    model: nn.Module
    description: str


def _merge_adapter(run: Run, run_model: nn.Module, client: int | None) -> _Merged:
    """Merge the adapter of a run's model into the backbone's weights, if PEFT can."""
    if isinstance(run_model, Ensemble):
        return _Merged(run_model, "It averages several models, whose adapters are kept as layers.")
    try:
        model = run.merged(client)
    except (NotImplementedError, ValueError, RuntimeError, AttributeError):  # depends on PEFT's method
        return _Merged(
            run_model,
            "The adapter is kept as layers of the model: it cannot be merged into the backbone's weights.",
        )
    return _Merged(model, "The adapter is merged: the model has the layers and names of the plain backbone.")


# Each of the following functions writes a file and returns the model that it reads from it.


def _write_safetensors(model: nn.Module, x: Tensor, path: Path, metadata: dict[str, str]) -> _ReadModel:
    tensors = {name: value.cpu().clone().contiguous() for name, value in model.state_dict().items()}
    path.write_bytes(save(tensors, metadata))
    read_model = copy.deepcopy(model)
    # All tensors are set to zero first, so that one that is missing in the file changes the logits.
    for value in read_model.state_dict().values():
        value.zero_()
    with safe_open(path, framework="pt") as file:
        read_model.load_state_dict({name: file.get_tensor(name) for name in file.keys()})
    return read_model


def _write_torch_export(model: nn.Module, x: Tensor, path: Path, metadata: dict[str, str]) -> _ReadModel:
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: Dim("batch")},))
    torch.export.save(exported, path, extra_files={"metadata.json": json.dumps(metadata)})
    read_model: _ReadModel = torch.export.load(path).module()
    return read_model


def _write_onnx(model: nn.Module, x: Tensor, path: Path, metadata: dict[str, str]) -> _ReadModel:
    import onnxruntime
    from onnx_ir.passes.common import DeduplicateInitializersPass

    output_names = ["logits", "typical"] if isinstance(model, BothModelsNetwork) else ["logits"]
    if images_dtype(model) == torch.float64:
        # onnxruntime has no convolutions in double precision.
        model = copy.deepcopy(model).float()
        x = x.float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the exporter's internals
        program: Any = torch.onnx.export(
            model,
            (x,),
            dynamo=True,
            dynamic_shapes=({0: Dim("batch")},),
            input_names=["images"],
            output_names=output_names,
            custom_translation_table={torch.ops.aten.logaddexp.default: _onnx_logaddexp},
            verbose=False,
        )
    # The exporter writes a tensor once for each place that uses it, such as both models of a client.
    DeduplicateInitializersPass(size_limit=sys.maxsize)(program.model)
    program.model.metadata_props.update(metadata)
    program.save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def read_model(images: Tensor) -> Tensor | tuple[Tensor, ...]:
        outputs = session.run(None, {"images": images.to(x.dtype).numpy()})
        tensors = tuple(torch.from_numpy(output) for output in outputs)
        return tensors if len(tensors) > 1 else tensors[0]

    return read_model


def _onnx_logaddexp(first: Any, second: Any) -> Any:  # noqa: ANN401  # tensors of a graph in ONNX
    """Return the graph of log(exp(a) + exp(b)). The exporter's own one overflows, and is -inf for small values."""
    from onnxscript import opset18

    larger = opset18.Max(first, second)
    distance = opset18.Abs(opset18.Sub(first, second))
    return opset18.Add(larger, opset18.Softplus(opset18.Neg(distance)))
