"""Whether the Hugging Face hub can be asked about a model."""

import re

ID = re.compile(r"(?:[\w-][\w.-]*/)?[\w-][\w.-]*")
TIMEOUT = 5.0  # seconds: of the hub's own calls some ask without a deadline, and others five times over


def obstacle(name: str) -> str:
    """Why the hub cannot give anything of this model now, in a few words; empty if it can."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=TIMEOUT)
    except GatedRepoError:
        return "it is gated: ask for access on its page, then run `hf auth login`"
    except RepositoryNotFoundError:
        return "the hub has no such id (a private one needs `hf auth login`)"
    except Exception as error:  # of whichever HTTP client the installed version uses
        return f"the hub cannot be reached ({type(error).__name__})"
    return ""
