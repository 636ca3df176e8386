"""The zoo's list: what ordinary trainings are, what bsearch is to make of each, and what plain torch says of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

from zoo.plain import Step

Losses = Callable[[Sequence[Step]], list[float]]
Metrics = Callable[[], dict[str, float]]


@dataclass(frozen=True, slots=True)
class Entry:
    """One training.

    Args:
        reference: the task, as in study.yaml.
        expects: exact: it runs, and any split equals the one large batch; unsplit: it runs, its batch is never split; noted:
            it runs, and bsearch tells something about it; refused: it does not run.
        says: what the message or a finding has to contain, a regular expression without regard to case.
        twin: the right mean loss of every step, in plain torch; in the entry's own module, as are `metrics`.
        metrics: the right values of the new model's metrics on the whole validation set.
        metric: the one that the study compares trials on.
        double: trained in double precision.
        needs: what older versions of bsearch do not have.
    """

    name: str
    reference: str
    expects: Literal["exact", "noted", "unsplit", "refused"]
    says: str = ""
    twin: str = ""
    metrics: str = ""
    metric: str = "accuracy"
    double: bool = False
    needs: str = ""

    @property
    def module(self) -> str:
        return self.reference.partition(":")[0]

    @property
    def framework(self) -> str:
        """The trainer that an adapter drives, or an empty string."""
        return self.module.partition("zoo.adapters_")[2]

    @property
    def is_loop(self) -> bool:
        """Whether it is a function, made of `Loop` or not."""
        return self.reference.rpartition(":")[2].islower()

    def losses(self, steps: Sequence[Step]) -> list[float]:
        twin: Losses = self._function(self.twin)
        return twin(steps)

    def right_metrics(self) -> dict[str, float]:
        metrics: Metrics = self._function(self.metrics)
        return metrics()

    def _function(self, name: str) -> Callable[..., list[float] | dict[str, float]]:
        module, _, name = name.rpartition(".")
        return getattr(import_module(f"zoo.{module}" if module else self.module), name)


CARTPOLE = Path(__file__).parents[2] / "examples" / "own_loop" / "cartpole.py"
_EXACT = [
    Entry("classifier", "zoo.vision:Digits", "exact", twin="classifier", metrics="classifier_metrics"),
    Entry("label smoothing", "zoo.vision:Smoothed", "exact", twin="smoothed"),
    Entry(
        "class weights, their sum as denominator", "zoo.vision:ClassWeights", "exact", twin="class_weights"
    ),
    Entry("L1 penalty × samples", "zoo.vision:SparseWeights", "exact", twin="sparse_weights"),
    Entry("dropout", "zoo.vision:Dropout", "exact", twin="dropout"),
    Entry(
        "segmentation, ignored pixels, mIoU",
        "zoo.vision:Segmentation",
        "exact",
        twin="segmentation",
        metrics="segmentation_metrics",
        metric="miou",
        needs="WholeSet",
    ),
    Entry(
        "distillation, frozen teacher with BatchNorm",
        "zoo.vision:Distillation",
        "exact",
        says="teacher",
        twin="distillation",
    ),
    Entry(
        "frozen backbone in evaluation mode, with BatchNorm",
        "zoo.vision:FrozenBackbone",
        "exact",
        says="backbone",
        twin="frozen_backbone",
    ),
    Entry(
        "detector, losses inside the model",
        "zoo.vision:Detection",
        "exact",
        twin="detection",
        metrics="detection_metrics",
        metric="box_error",
    ),
    Entry(
        "batches fetched at once",
        "zoo.vision:FetchedAtOnce",
        "exact",
        twin="classifier",
        metrics="classifier_metrics",
    ),
    Entry("tokens with ignored labels", "zoo.text:Tagger", "exact", twin="tagged", metrics="tagged_metrics"),
    Entry("batch in a defaultdict", "zoo.text:Named", "exact", twin="tagged", metrics="tagged_metrics"),
    Entry("batch in a UserDict", "zoo.text:Tokenized", "exact", twin="tagged", metrics="tagged_metrics"),
    Entry(
        "LSTM of packed sequences", "zoo.text:PackedLSTM", "exact", twin="packed", metrics="packed_metrics"
    ),
    Entry(
        "CTC, unequal lengths",
        "zoo.text:CTC",
        "exact",
        twin="aligned",
        metrics="aligned_metrics",
        metric="ctc",
    ),
    Entry(
        "language model with tied weights, AdamW",
        "zoo.text:TiedWeights",
        "exact",
        twin="tied",
        metrics="tied_metrics",
        metric="val_loss",
        double=True,
    ),
    Entry("EmbeddingBag with sparse gradients, SGD", "zoo.text:SparseBag", "exact", twin="bagged"),
    Entry(
        "recommender with SparseAdam, weighted",
        "zoo.text:Recommender",
        "exact",
        twin="recommended",
        metrics="recommended_metrics",
        metric="mse",
        double=True,
    ),
    Entry(
        "graphs of unequal size",
        "zoo.structured:GraphClasses",
        "exact",
        twin="graph_classes",
        metrics="graph_metrics",
    ),
    Entry("two heads, weighted", "zoo.structured:MultiTask", "exact", twin="multi_task"),
    Entry(
        "regression, RMSE",
        "zoo.structured:Regression",
        "exact",
        twin="regression",
        metrics="regression_metrics",
        metric="rmse",
        double=True,
    ),
    Entry(
        "regression, R2",
        "zoo.structured:Determination",
        "exact",
        twin="regression",
        metrics="determination_metrics",
        metric="r2",
        double=True,
        needs="WholeSet",
    ),
    Entry(
        "rare class, AUROC",
        "zoo.structured:Screening",
        "exact",
        twin="screened",
        metrics="screened_metrics",
        metric="auroc",
        needs="WholeSet",
    ),
    Entry(
        "rare class, macro F1",
        "zoo.structured:MacroF1",
        "exact",
        twin="screened",
        metrics="macro_f1_metrics",
        needs="WholeSet",
    ),
    Entry(
        "VAE",
        "zoo.generative:Autoencoder",
        "exact",
        says="random",
        twin="autoencoder",
        metrics="autoencoder_metrics",
        metric="elbo",
    ),
    Entry(
        "diffusion, random time and noise",
        "zoo.generative:Diffusion",
        "exact",
        says="random",
        twin="diffusion",
        metrics="diffusion_metrics",
        metric="val_loss",
    ),
    Entry("penalty on input gradients", "zoo.generative:GradientPenalty", "exact", twin="gradient_penalty"),
    Entry("validation augmented by torch's generator", "zoo.wrong:JitteredValidation", "exact"),
]

_COUPLED = [
    Entry(
        f"{name}, {told}", f"zoo.coupled:{declared}{task}", expects, says, twin, metrics, metric, needs=needs
    )
    for name, task, twin in (
        ("SimCLR", "SimCLR", "simclr"),
        ("supervised contrast", "SupCon", "supcon"),
        ("batch-hard triplets", "Triplets", "triplets"),
        ("Barlow Twins", "BarlowTwins", "barlow_twins"),
    )
    for told, declared, expects, says, twin, metrics, metric, needs in (
        ("mean × n", "", "refused", "couples_samples", "", "", "alignment", ""),
        (
            "couples_samples",
            "Declared",
            "unsplit",
            "",
            twin,
            "nearest_neighbour_metrics",
            "accuracy",
            "couples_samples",
        ),
    )
]
_COUPLED += [
    Entry(
        "CLIP, mean × n, accuracy in the batch", "zoo.coupled:ImagesAndWords", "refused", "couples_samples"
    ),
    Entry(
        "CLIP, couples_samples",
        "zoo.coupled:DeclaredCLIP",
        "unsplit",
        twin="clip",
        metrics="clip_metrics",
        needs="couples_samples",
    ),
    Entry("Dice over the batch", "zoo.coupled:BatchDice", "refused", "couples_samples"),
    Entry(
        "PPO, advantages normalised in the batch",
        "zoo.coupled:Policy",
        "refused",
        "couples_samples",
        metric="gain",
    ),
    Entry(
        "PPO, couples_samples",
        "zoo.coupled:DeclaredPolicy",
        "unsplit",
        twin="policy",
        metric="gain",
        needs="couples_samples",
    ),
    Entry("spectral normalisation", "zoo.coupled:Lipschitz", "noted", "updates tensors"),
    Entry("BatchNorm", "zoo.coupled:Normed", "noted", "BatchNorm"),
    Entry("a normalisation of one's own", "zoo.coupled:OwnNorm", "refused", "batch|samples"),
]

_WRONG = [
    Entry("class-weighted mean × n", "zoo.wrong:WeightedMean", "refused", "denominator"),
    Entry("mean over tokens × n", "zoo.wrong:TokenMean", "refused", "denominator"),
    Entry("mean as total", "zoo.wrong:MeanAsTotal", "refused", "their mean|a mean"),
    Entry("sum, denominator 1", "zoo.wrong:NoDenominator", "refused", "denominator"),
    Entry("mean, denominator 1", "zoo.wrong:MeanOfMeans", "refused", "denominator|mean"),
    Entry("(N, 1) against (N,)", "zoo.wrong:Broadcast", "refused", "broadcast", metric="rmse", double=True),
    Entry("L1 penalty once a call", "zoo.wrong:PenaltyOnce", "refused", "constant term"),
    Entry(
        "denominator clamped to 1", "zoo.wrong:ClampedDenominator", "refused", "a denominator|own denominator"
    ),
    Entry(
        "mean over padding", "zoo.wrong:MeanOverPadding", "refused", "pad|collate|samples", metric="val_loss"
    ),
    Entry("AUROC × n", "zoo.wrong:MeanAUROC", "refused", "WholeSet", metric="auroc"),
    Entry("macro F1 × n", "zoo.wrong:MeanF1", "refused", "WholeSet", metric="f1"),
    Entry("MixUp in collate, validation too", "zoo.wrong:MixUp", "noted", "train_collate"),
    Entry(
        "MixUp in train_collate",
        "zoo.wrong:MixUpInTraining",
        "noted",
        "collate|random|mix",
        needs="train_collate",
    ),
    Entry("training data with default_rng", "zoo.wrong:OwnGenerator", "refused", "generator|random"),
    Entry("validation data with default_rng", "zoo.wrong:UnrepeatableValidation", "noted", "again|random"),
    Entry("a stream, its samples not stated", "zoo.wrong:Unmeasured", "refused", "samples"),
    Entry("a stream", "zoo.wrong:Stream", "exact", needs="samples"),
    Entry("EMA updated in loss", "zoo.wrong:AverageInLoss", "refused", "average|updates|changes|micro-batch"),
    Entry("a scheduler made in optimizer", "zoo.wrong:OwnScheduler", "refused", "scheduler"),
    Entry("LBFGS", "zoo.wrong:SecondOrder", "refused", "closure"),
    Entry("SAM", "zoo.wrong:SharpnessAware", "refused", "closure"),
]

_LOOPS = [
    Entry("own loop", "zoo.loops:own_loop", "noted"),
    Entry("own loop like nanoGPT's", "zoo.loops:nano_gpt", "noted", metric="val_loss"),
    Entry("GAN, two optimizers", "zoo.loops:adversarial", "noted", metric="distance"),
]

_LIFE = [
    Entry(
        "a temperature beside the model",
        "zoo.life:Temperature",
        "refused",
        "self.log_temperature, which no model holds",
    ),
    Entry("a backbone in no optimizer", "zoo.life:HeadAlone", "refused", "got none for 0.bias, 0.weight"),
    Entry("layer-wise decay, lr_scale", "zoo.life:LayerDecay", "exact", twin="layer_decayed"),
    Entry("layer-wise decay, multiplied", "zoo.life:LayerDecayMultiplied", "exact", twin="layer_decayed"),
    Entry("schedule-free SGD", "zoo.life:WithoutSchedule", "exact", twin="schedule_free"),
    Entry(
        "a curriculum that counts steps",
        "zoo.life:Curriculum",
        "refused",
        "self.steps, which was 2 and is 0 again",
    ),
    Entry("a generator of the task's", "zoo.life:OwnDraws", "refused", "saved and resumed"),
    Entry("a score that changes the loss", "zoo.life:ScoreThatCounts", "refused", "when it is evaluated"),
    Entry(
        "a layer that counts its calls", "zoo.life:CountsCalls", "refused", "once per micro-batch: 1.calls"
    ),
    Entry("unfreezing in after_step", "zoo.life:Unfreezing", "refused", "got none for 0.bias, 0.weight"),
    Entry("a mean teacher in after_step", "zoo.life:Teacher", "exact", twin="taught"),
    Entry("experts with a loss of their balance", "zoo.life:Experts", "refused", "couples_samples"),
    Entry("Loop", "zoo.life:plain", "exact"),
    Entry("Loop, evaluation mode left on", "zoo.life:evaluation_mode", "exact"),
    Entry("Loop, gradients never cleared", "zoo.life:never_cleared", "refused", "zero_grad"),
    Entry("Loop, a step for each part", "zoo.life:stepped_in_parts", "refused", "once, after all parts"),
    Entry("Loop, divided by the accumulation", "zoo.life:counts_parts_again", "refused", "setup.plan"),
    Entry("Loop, ReduceLROnPlateau", "zoo.life:plateau", "refused", "got ReduceLROnPlateau"),
    Entry("Loop, its own rate", "zoo.life:rate_of_its_own", "refused", "something else sets it"),
    Entry("Loop, counting its steps", "zoo.life:counts_steps", "refused", "step.number"),
    Entry(
        "Loop, pseudo-labels of its own model as data",
        "zoo.life:pseudo_labels",
        "refused",
        "that do not depend on the weights",
    ),
    Entry("Loop, PPO on cart-pole", f"{CARTPOLE}:train", "exact", metric="balanced"),
    Entry("Loop, weight decay by the fraction", "zoo.life:weight_decay_by_the_step", "exact"),
]

_HF, _LIGHTNING = "zoo.adapters_huggingface", "zoo.adapters_lightning"
_ADAPTERS = [
    Entry("HF classifier", f"{_HF}:classifier", "exact", twin="classified", metric="loss"),
    Entry("HF language model", f"{_HF}:language", "exact", twin="spoken", metric="loss"),
    Entry("HF tokens, class weights", f"{_HF}:weighted_tokens", "refused", "denominator", metric="loss"),
    Entry(
        "HF tokens, class weights, denominator=",
        f"{_HF}:declared_weights",
        "exact",
        twin="weighted",
        metric="loss",
        needs="hf_arguments",
    ),
    Entry(
        "HF tokens, micro-batches without labels",
        f"{_HF}:few_labels",
        "exact",
        twin="few_labelled",
        metric="loss",
    ),
    Entry("HF CLIP", f"{_HF}:clip", "refused", "couples_samples", metric="loss"),
    Entry(
        "HF CLIP, couples_samples=True",
        f"{_HF}:declared_clip",
        "unsplit",
        twin="contrasted",
        metric="loss",
        needs="hf_arguments",
    ),
    Entry("Lightning classifier", f"{_LIGHTNING}:classifier", "exact", twin="classified", metric="val_f1"),
    Entry(
        "Lightning, class-weighted mean",
        f"{_LIGHTNING}:class_weights",
        "refused",
        "denominator",
        metric="val_f1",
    ),
    Entry(
        "Lightning, class weights, denominator",
        f"{_LIGHTNING}:declared_weights",
        "exact",
        twin="classified_with_weights",
        metric="val_f1",
    ),
    Entry(
        "Lightning, WeightedRandomSampler",
        f"{_LIGHTNING}:weighted_sampler",
        "exact",
        twin="classified",
        metric="val_f1",
        needs="sample_weights",
    ),
]

ENTRIES = [*_EXACT, *_COUPLED, *_WRONG, *_LIFE, *_LOOPS, *_ADAPTERS]
