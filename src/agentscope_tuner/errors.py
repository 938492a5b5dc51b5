"""Every error this package raises on purpose.

    TunerError
    ├── ConfigError                 a setting is unknown, wrong, or without effect      (ValueError)
    │   ├── SignatureError          a workflow or judge does not have the expected form (ValueError)
    │   └── RoleError               roles, default models and `trainable_targets` disagree
    ├── DataError                   a dataset is missing, empty or malformed            (ValueError)
    ├── ModelError                  a model cannot be loaded or is not supported
    ├── CheckpointError             a checkpoint cannot be written, or is not intact
    ├── MissingDependencyError      an optional package is not installed                (ImportError)
    ├── EpisodeFailure              ends one episode, never the run
    │   ├── EpisodeTimeoutError     the workflow ran past its time limit
    │   ├── PromptTooLongError      a prompt leaves no room in the context
    │   ├── UnsupportedContentError a message holds something the policy cannot read
    │   ├── RewardError             no reward, or one that is not a finite number
    │   ├── NoTrainedCallError      the workflow never called a trained role
    │   └── ReplayError             a branched episode did not repeat itself up to the branch
    └── TrainingStoppedError        the run ends here; everything finished is on disk
        ├── TooManyFailuresError    more episodes failed than `max_failed_fraction` allows
        └── ParityError             the learner disagrees with the sampler

An `EpisodeFailure` is data: it is stored with its episode and counted. All others end the run.
"""


class TunerError(Exception):
    """Base of every error raised by agentscope-tuner."""


class ConfigError(TunerError, ValueError):
    """A setting is unknown, has a wrong value, or would have no effect."""


class SignatureError(ConfigError):
    """A workflow or judge function does not have one of the accepted forms."""


class RoleError(ConfigError):
    """A role is unknown, or is untrained and has no default model."""


class DataError(TunerError, ValueError):
    """A dataset is missing, empty, or has a malformed row."""


class ModelError(TunerError):
    """A model cannot be loaded, or its architecture is not supported."""


class CheckpointError(TunerError):
    """A checkpoint cannot be written, or what was read is not what was written."""


class MissingDependencyError(TunerError, ImportError):
    """An optional package is missing; the message holds its install command."""


class EpisodeFailure(TunerError):
    """Ends one episode. The episode is recorded with its error and the run goes on."""


class EpisodeTimeoutError(EpisodeFailure):
    """The workflow did not return within `workflow.timeout_s`."""


class PromptTooLongError(EpisodeFailure):
    """A prompt leaves no room for even one new token."""


class UnsupportedContentError(EpisodeFailure):
    """A message holds images, audio, or another block that a text policy cannot read."""


class RewardError(EpisodeFailure):
    """An episode ended without a reward, or with one that is not a finite number."""


class NoTrainedCallError(EpisodeFailure):
    """The workflow returned without a single call to a trained role."""


class ReplayError(EpisodeFailure):
    """An episode that was to be continued from one of its turns did not come there again: it is not deterministic."""


class TrainingStoppedError(TunerError):
    """Training cannot go on. Finished episodes and checkpoints are on disk."""


class TooManyFailuresError(TrainingStoppedError):
    """More than `algorithm.max_failed_fraction` of a batch failed."""


class ParityError(TrainingStoppedError):
    """Before any update, the learner and the sampler disagree about a recorded call."""
