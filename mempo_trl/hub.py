"""Uploads to the Hugging Face Hub that never cost a training."""

import contextlib
import fnmatch
import functools
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, cast

from accelerate.utils import broadcast_object_list
from huggingface_hub import CommitInfo, HfApi, constants, get_session, get_token
from huggingface_hub.errors import (
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from transformers import TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy, SaveStrategy
from transformers.utils.hub import PushInProgress

from .agent_settings import FILE_NAME as SETTINGS_FILE
from .agent_settings import AgentSettings
from .checkpoints import ResumableTrainer
from .model_card import extend_card


logger = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds between attempts, hence one attempt more.
WAITS = (2.0, 8.0, 30.0)
# A Hub that asks for more than this is tried again with the next save.
LONGEST_WAIT = 120.0
# Seconds without a byte after which a connection counts as dead. The Hub's client would wait for ever, and a training
# that is over would wait with it.
LONGEST_SILENCE = 300.0

# What programs leave behind while they write.
TEMPORARY = ["*.tmp", "*.temp", "*.part", "*.partial", "*.incomplete", "*.lock", "*.swp", "*~", "tmp-*", ".nfs*"]
_STAGE = "_hub-"
_SMALL = 10 * 2**20  # bytes
_WEIGHTS = ["*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model*.bin.index.json"]
_MODEL_FILES = [
    *_WEIGHTS,
    "config.json",
    SETTINGS_FILE,
    "generation_config.json",
    "adapter_*",
    "training_args.bin",
    "*.py",
]
_NOT_IN_MODEL = ["zero_to_fp32.py"]
# Of all requests of an upload, these are the ones that `huggingface_hub` makes once. It repeats every other itself, six
# times within half a minute, and the last of these too where it uploads through `hf_xet`.
_UNREPEATED = ["/api/validate-yaml", "/api/repos/create", "/commit/"]
_HAS_XET = find_spec("hf_xet") is not None


class PushError(RuntimeError):
    """A push to the Hub has failed for good.

    Attributes:
        refused: whether the Hub was there and said no, so that trying again will not help.
    """

    def __init__(self, message: str, refused: bool = False):
        super().__init__(message)
        self.refused = refused


class HubUploader:
    """Uploads a trainer's files, again if need be, in the background if wanted. Lives in the main process.

    Args:
        args: the training arguments. Nothing is read from them but what concerns the Hub, and `output_dir`.

    Attributes:
        repo_id: the repository; as long as it is not known to exist, what the user calls it.
        waiting: checkpoints that the Hub does not have yet.
        skipped: whether a save found another upload in progress.
    """

    def __init__(self, args: TrainingArguments):
        self.output_dir = Path(str(args.output_dir))
        self.repo_id = args.hub_model_id or self.output_dir.absolute().name
        self.waiting: list[Path] = []
        self.skipped = False
        self._token, self._private = args.hub_token, args.hub_private_repo
        self._revision = args.hub_revision
        self._exists = False
        self._api = HfApi(library_name="mempo_trl")
        self._executor: ThreadPoolExecutor | None = None

    def create_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository, unless it exists or has been created before.

        Args:
            token: the token, instead of that of the training arguments.
            private: whether it is created private, instead of what the training arguments say.

        Raises:
            PushError: if it cannot be created.
        """
        if self._exists:
            return
        token = token if token is not None else self._token
        private = private if private is not None else self._private
        url = self._retry(
            lambda: self._api.create_repo(self.repo_id, token=token, private=private, exist_ok=True),
            f"Creating the repository {self.repo_id!r} on the Hub",
            token,
        )
        self.repo_id = url.repo_id
        self._exists = True

    def upload(
        self,
        folder: Path,
        message: str,
        revision: str | None = None,
        token: str | None = None,
        private: bool | None = None,
    ) -> CommitInfo:
        """Upload a folder, without what is temporary, and create the repository if it is not there.

        Args:
            folder: what goes to the root of the repository. If the repository turns out to have another name than
                `repo_id`, its README.md is changed accordingly.
            message: the commit message.
            revision: the branch, instead of that of the training arguments.
            token, private: as for `create_repo`.

        Returns:
            The commit.

        Raises:
            PushError: if all attempts have failed, or one was refused.
        """
        named = self.repo_id
        self.create_repo(token, private)
        if named != self.repo_id:
            _rename_in_card(folder / "README.md", named, self.repo_id)
        token = token if token is not None else self._token

        def send() -> CommitInfo:
            try:
                return self._api.upload_folder(
                    repo_id=self.repo_id,
                    folder_path=folder,
                    commit_message=message,
                    token=token,
                    ignore_patterns=["_*", f"{PREFIX_CHECKPOINT_DIR}-*", *TEMPORARY]
                    if folder == self.output_dir
                    else None,
                    revision=revision or self._revision,
                )
            except RepositoryNotFoundError:
                self._exists = False  # deleted meanwhile: the next push creates it again
                raise

        return self._retry(send, f"The upload to {self.repo_id!r} on the Hub", token)

    def in_background(self, job: Callable[[], T]) -> "Future[T]":
        """Run a job after those that were given before."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hub")
        return self._executor.submit(job)

    def push_checkpoint(self, stage: Path, checkpoints: list[Path], message: str) -> None:
        """Upload what `stage` made, then remove it. Never raises: what goes wrong is logged.

        Args:
            stage: the staged files.
            checkpoints: the checkpoints that they come from.
            message: the commit message.
        """
        try:
            self.upload(stage, message)
            for checkpoint in checkpoints:  # one by one and in place: the trainer changes the list meanwhile
                with contextlib.suppress(ValueError):
                    self.waiting.remove(checkpoint)
        except Exception as error:
            self.warn(error, checkpoints[-1])
        finally:
            shutil.rmtree(stage, ignore_errors=True)

    def warn(self, error: Exception, checkpoint: Path) -> None:
        """Say that a checkpoint was not pushed, and that nothing is lost."""
        logger.warning(
            "%s Training goes on. The checkpoint is safe on disk in %s, and the next save pushes again.",
            self._scrub(str(error), self._token),
            checkpoint,
        )

    def stage(self, checkpoint: Path, save_processing_class: Callable[[Path], Any], folders: dict[str, Path]) -> Path:
        """Set aside what is to be uploaded, since the originals are overwritten and deleted while training goes on.

        Args:
            checkpoint: the checkpoint whose model is uploaded.
            save_processing_class: saves the tokenizer in a folder.
            folders: checkpoints to upload whole, by their names in the repository.

        Returns:
            A new folder. Files of checkpoints are hard links there, where the file system has them.
        """
        for left_over in self.output_dir.glob(f"{_STAGE}*"):
            if self._executor is None:  # of a run that was killed
                shutil.rmtree(left_over, ignore_errors=True)
        stage = Path(tempfile.mkdtemp(prefix=_STAGE, dir=self.output_dir))
        try:
            # Logs and the model card, but not a model saved at another time.
            shutil.copytree(
                self.output_dir,
                stage,
                ignore=self._ignore_in_output_dir,
                copy_function=_copy_small,
                ignore_dangling_symlinks=True,
                dirs_exist_ok=True,
            )
            for file in checkpoint.iterdir():
                if file.is_file() and _matches(file.name, _MODEL_FILES) and file.name not in _NOT_IN_MODEL:
                    (stage / file.name).unlink(missing_ok=True)
                    _link(file, stage / file.name)
            save_processing_class(stage)
            for name, folder in folders.items():
                ignore = shutil.ignore_patterns(*TEMPORARY)
                shutil.copytree(folder, stage / name, copy_function=_link, ignore=ignore)
        except BaseException:
            shutil.rmtree(stage, ignore_errors=True)
            raise
        return stage

    def _ignore_in_output_dir(self, folder: str, names: list[str]) -> set[str]:
        ignored = {name for name in names if _matches(name, TEMPORARY)}
        if Path(folder) == self.output_dir:
            patterns = ["_*", f"{PREFIX_CHECKPOINT_DIR}-*", ".git", ".cache", *_MODEL_FILES]
            ignored |= {name for name in names if _matches(name, patterns)}
        return ignored

    def _retry(self, action: Callable[[], T], what: str, token: str | None) -> T:
        for attempt in range(len(WAITS) + 1):
            try:
                if get_session().timeout.read is None:
                    get_session().timeout = LONGEST_SILENCE
                return action()
            except Exception as error:
                refused = _is_refused(error)
                wait = _wait_after(error, attempt)
                reason = self._scrub(_describe(error), token)
                if wait is None:
                    # The original would print the token where the Hub repeats it.
                    silent = all(self._scrub(str(e), token) == str(e) for e in _chain(error))
                    cause = error if silent else None
                    tried = f" after {attempt + 1} attempts" if attempt else ""
                    raise PushError(f"{what} failed{tried}: {reason}", refused) from cause
                logger.info("%s failed and is tried again in %g seconds: %s", what, wait, reason)
                time.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    @staticmethod
    def _scrub(text: str, token: str | None) -> str:
        for secret in (token, get_token()):
            if secret:
                text = text.replace(secret, "<token>")
        return text


class HubTrainer(ResumableTrainer):
    """The part of a trainer that pushes to the Hub."""

    hub_model_id: Any  # a name or None
    push_in_progress: Any  # a `PushInProgress` or None

    @functools.cached_property
    def _hub(self) -> HubUploader:
        return HubUploader(self.args)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """
        Create the repository `self.args.hub_model_id`. Call it on every process.

        A Hub that cannot be reached is worth a warning: the next push tries again.

        Args:
            token (`str`, *optional*):
                Token with write permission. Defaults to `self.args.hub_token`.
            private (`bool`, *optional*):
                Whether to make the repo private when it is created. Defaults to `self.args.hub_private_repo`.

        Raises:
            PushError: if the Hub refuses, on every process.
        """
        refusal: list[str | None] = [None]
        if self.is_world_process_zero():
            try:
                self._hub.create_repo(token, private)
            except PushError as error:
                if error.refused:
                    refusal = [str(error)]
                else:
                    logger.warning("%s Training goes on; the next push tries again.", error)
            self.hub_model_id = self._hub.repo_id
            self.push_in_progress = None
        broadcast_object_list(refusal)
        if refusal[0] is not None:
            raise PushError(
                f"{refusal[0]} Check `hub_token` (or log in with `hf auth login`) and `hub_model_id`, or set "
                "`push_to_hub=False`.",
                refused=True,
            )

    def create_model_card(  # type: ignore[override]
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """
        Write `README.md` in the output directory: TRL's model card, with the last metrics, the settings that matter at
        inference, and code that runs the agent.

        Args:
            model_name (`str`, *optional*):
                Name of the model.
            dataset_name (`str`, *optional*):
                Name of the dataset used for training.
            tags (`str` or `list[str]`, *optional*):
                Tags to be associated with the model card.
        """
        if not self.is_world_process_zero():
            return
        if self.hub_model_id is not None:
            self.hub_model_id = self._hub.repo_id  # a push may have found out its full name
        super().create_model_card(model_name, dataset_name, tags)
        card, model_id = Path(str(self.args.output_dir)) / "README.md", self.hub_model_id or model_name or "model"
        extend_card(card, model_id, self._agent_settings(), self.state.log_history, dataset_name)

    def _agent_settings(self) -> AgentSettings:
        """What the agent needs at inference."""
        raise NotImplementedError

    def _save(self, output_dir=None, state_dict=None) -> None:
        with without_tokens(self.args):
            super()._save(output_dir, state_dict)
        if self.args.should_save:  # other processes are only here for what they have of the weights
            self._agent_settings().save(output_dir if output_dir is not None else str(self.args.output_dir))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """
        Save the model, as TRL's trainer does. If it is then pushed to the Hub, a push that fails is a warning.
        """
        super().save_model(output_dir, _internal_call=True)
        if self.args.push_to_hub and not _internal_call:
            try:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
            except PushError as error:
                logger.warning("%s", error)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs,
    ):
        """
        Save the model, the tokenizer and the model card in the output directory and upload it. Call it on every
        process; only the main one uploads, and none waits for it.

        Args:
            commit_message (`str`, *optional*, defaults to `"End of training"`):
                Message of the commit.
            blocking (`bool`, *optional*, defaults to `True`):
                Whether to return only when the upload has finished.
            token (`str`, *optional*):
                Token with write permission. Defaults to `self.args.hub_token`.
            revision (`str`, *optional*):
                Branch to commit to. Defaults to `self.args.hub_revision`.
            private (`bool`, *optional*):
                Whether to make the repo private when it is created. Defaults to `self.args.hub_private_repo`.
            kwargs:
                Arguments of [`create_model_card`](MemPOTrainer.create_model_card).

        Returns:
            The commit, or a `Future` of it if `blocking=False`; `None` on all processes but the main one.

        Raises:
            PushError: if the upload fails, after several attempts. With `blocking=False` the `Future` raises it.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self._finish_current_push()
        output_dir = self._hub.output_dir
        self.hub_model_id = self._hub.repo_id
        tags = kwargs.pop("tags", None) or []
        tags = [*([tags] if isinstance(tags, str) else tags), *(getattr(self.model, "model_tags", None) or [])]
        model_name = kwargs.pop("model_name", None) or self.hub_model_id.split("/")[-1]
        self.create_model_card(model_name=model_name, tags=tags, **kwargs)

        def upload():
            try:
                return self._hub.upload(output_dir, commit_message or "End of training", revision, token, private)
            except PushError as error:
                message = f"{error} The files are on disk in {output_dir}: call `push_to_hub()` again to upload them."
                if not blocking:
                    logger.warning("%s", message)
                raise PushError(message, error.refused) from error
            finally:
                self.hub_model_id = self._hub.repo_id

        return upload() if blocking else self._hub.in_background(upload)

    def _checkpoint_saved(self, checkpoint: Path) -> None:
        if self.args.push_to_hub and self.args.hub_strategy != HubStrategy.END:
            self._push_checkpoint(checkpoint)

    def _push_checkpoint(self, checkpoint: Path) -> None:
        # The others write parts of a checkpoint as well.
        self.accelerator.wait_for_everyone()
        if not self.is_world_process_zero():
            return
        if self.args.hub_strategy != HubStrategy.ALL_CHECKPOINTS:
            self._hub.waiting.clear()
        self._hub.waiting.append(checkpoint)
        in_progress = self.push_in_progress is not None and not self.push_in_progress.is_done()
        self._hub.skipped = in_progress and not self.args.hub_always_push
        if not self._hub.skipped:
            self._push_waiting()

    def _push_waiting(self) -> None:
        """Upload in the background what has been saved and not been pushed."""
        hub = self._hub
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        checkpoints = [checkpoint for checkpoint in hub.waiting if checkpoint.exists()]
        if not checkpoints:
            return
        folders = {}
        if self.args.hub_strategy == HubStrategy.CHECKPOINT:
            folders = {"last-checkpoint": checkpoints[-1]}
        elif self.args.hub_strategy == HubStrategy.ALL_CHECKPOINTS:
            folders = {checkpoint.name: checkpoint for checkpoint in checkpoints}
        by_steps = self.args.save_strategy == SaveStrategy.STEPS
        now = f"step {self.state.global_step}" if by_steps else f"epoch {int(self.state.epoch or 0)}"
        try:
            stage = hub.stage(checkpoints[-1], self._tokenizer.save_pretrained, folders)
        except Exception as error:  # a full disk is an `OSError` in Python, but not where tokenizers write
            hub.warn(error, checkpoints[-1])
            return
        job = hub.in_background(lambda: hub.push_checkpoint(stage, checkpoints, f"Training in progress, {now}"))
        running: list[Any] = self.push_in_progress.jobs if self.push_in_progress is not None else []
        self.push_in_progress = PushInProgress(cast(Any, [other for other in running if not other.done()] + [job]))

    def _finish_current_push(self) -> None:
        super()._finish_current_push()
        if self._hub.skipped:
            self._hub.skipped = False
            self._push_waiting()
            super()._finish_current_push()


@contextlib.contextmanager
def without_tokens(args: TrainingArguments) -> Iterator[None]:
    """Take the tokens out of training arguments that are about to be pickled beside the model."""
    model_init_kwargs = getattr(args, "model_init_kwargs", None)
    hidden: dict[str, Any] = {"hub_token": args.hub_token}
    if isinstance(model_init_kwargs, dict) and "token" in model_init_kwargs:
        hidden["model_init_kwargs"] = model_init_kwargs
        args.model_init_kwargs = {name: value for name, value in model_init_kwargs.items() if name != "token"}  # type: ignore[attr-defined]
    args.hub_token = None
    try:
        yield
    finally:
        for name, value in hidden.items():
            setattr(args, name, value)


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _link(source: Any, target: Any) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _copy_small(source: Any, target: Any) -> None:
    """Copy a log, which grows, but not a data set that somebody keeps beside it."""
    (shutil.copy2 if os.path.getsize(source) <= _SMALL else _link)(source, target)


def _rename_in_card(card: Path, before: str, after: str) -> None:
    """Change the quoted name of the repository in a model card."""
    if card.exists():
        text = card.read_text(encoding="utf-8")
        card.write_text(text.replace(f'"{before}"', f'"{after}"'), encoding="utf-8")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _response(error: Exception) -> Any:
    return next((e.response for e in _chain(error) if getattr(e, "response", None) is not None), None)  # type: ignore[attr-defined]


def _request_path(error: Exception) -> str | None:
    for e in _chain(error):
        with contextlib.suppress(AttributeError, RuntimeError):  # httpx raises the latter where it knows no request
            return str(e.request.url.path)  # type: ignore[attr-defined]
    return None


def _is_refused(error: Exception) -> bool:
    response = _response(error)
    if response is not None:
        return 400 <= response.status_code < 500 and response.status_code not in (408, 409, 412, 425, 429)
    return isinstance(error, HFValidationError | LocalTokenNotFoundError)


def _wait_after(error: Exception, attempt: int) -> float | None:
    """Seconds to wait before the next attempt, `None` if there should be none."""
    if attempt == len(WAITS) or _is_refused(error) or isinstance(error, OfflineModeIsEnabled | FileNotFoundError):
        return None
    path = _request_path(error)
    unrepeated = _UNREPEATED[:2] if _HAS_XET and not constants.HF_HUB_DISABLE_XET else _UNREPEATED
    if path is not None and not any(part in path for part in unrepeated):
        return None
    response = _response(error)
    asked = response.headers.get("retry-after", "") if response is not None else ""
    wait = max(WAITS[attempt], float(asked) if asked.isdigit() else 0.0)
    return wait if wait <= LONGEST_WAIT else None


def _describe(error: Exception) -> str:
    """What went wrong, in one line."""
    response = _response(error)
    texts = dict.fromkeys(" ".join(str(e).split()) for e in _chain(error))
    described = f"{type(error).__name__}: {' '.join(texts)}"
    if response is not None and response.status_code in (401, 403):
        described = f"the token was refused ({described})"
    if response is None and not isinstance(error, OfflineModeIsEnabled) and _request_path(error) is not None:
        described = f"{constants.ENDPOINT} cannot be reached ({described})"
    return described if described.endswith(".") else f"{described}."
