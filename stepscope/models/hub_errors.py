"""What can go wrong between here and the Hugging Face hub, in one sentence that says what to do."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from stepscope.errors import StepscopeError, UsageError

HUB_PREFIX = "hf:"
FULL = (errno.ENOSPC, errno.EDQUOT)
UNWRITABLE = (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR)


@dataclass(frozen=True, slots=True)
class HubId:
    repo: str
    file: str | None = None  # of several .gguf files, the one that is meant
    revision: str | None = None  # branch, tag or commit; None = the default branch

    def at(self, commit: str) -> str:
        """The same id that can mean no other files: `hf:org/name@commit`."""
        return f"{HUB_PREFIX}{self}@{commit}"

    def __str__(self) -> str:
        return self.repo if self.file is None else f"{self.repo}/{self.file}"


def hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def no_answer() -> tuple[type[Exception], ...]:
    """What the hub's HTTP library raises where there is no answer: the base of the hub's errors."""
    from huggingface_hub.errors import HfHubHTTPError

    return (OSError, *(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)))


def reason(error: BaseException) -> str:
    """In a few words; the library wraps what happened into paragraphs."""
    error = error.__cause__ or error
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[Errno -?\d+\] ", "", lines[0]).rstrip(".")[:120]


@contextmanager
def explained(wanted: HubId) -> Iterator[None]:
    """Every way to fail in one sentence that says what to do."""
    from huggingface_hub import errors

    repo, unanswered = wanted.repo, no_answer()
    try:
        yield
    except errors.HFValidationError:
        raise UsageError(f"{repo} is no id that the hub can have; check the spelling.") from None
    except errors.GatedRepoError:
        raise StepscopeError(
            f"{repo} is gated; accept its terms at https://huggingface.co/{repo} and set HF_TOKEN"
            " to a token of that account."
        ) from None
    except errors.RepositoryNotFoundError:
        raise UsageError(
            f"There is no directory {wanted} here and no model {repo} on the hub, unless it is"
            " private; check the spelling, or set HF_TOKEN."
        ) from None
    except errors.RevisionNotFoundError:
        raise UsageError(
            f"{repo} has no revision {wanted.revision}; give a branch, a tag or a commit of it."
        ) from None
    except errors.HfHubHTTPError as error:
        raise _refused(wanted, error.response.status_code) from None
    except unanswered as error:
        raise _broken(wanted, error) from None
    except UnicodeDecodeError:  # of a file that names a commit: a disk was full, or worse
        raise StepscopeError(
            f"What the cache {hub_cache()} knows of {repo} is damaged; delete its folder"
            f" models--{repo.replace('/', '--')} there and run it again."
        ) from None
    except (errors.EntryNotFoundError, RuntimeError) as error:
        raise _broken(wanted, error) from None


def _refused(wanted: HubId, status: int) -> StepscopeError:
    if status in (401, 403):
        return StepscopeError(
            f"The hub does not let you read {wanted.repo} (status {status}); set HF_TOKEN to a"
            " token that may."
        )
    return StepscopeError(f"The hub answers {wanted} with status {status}; try again later.")


def _broken(wanted: HubId, error: Exception) -> StepscopeError:
    number = error.errno if isinstance(error, OSError) else None
    if number in FULL or number in UNWRITABLE:
        return StepscopeError(
            f"The cache {hub_cache()} cannot be written ({os.strerror(number or 0)}); free some"
            " space or point HF_HOME to another disk."
        )
    return StepscopeError(
        f"Fetching {wanted} broke off ({reason(error)}); run it again, whole files are kept."
    )
