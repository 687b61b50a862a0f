"""What AWS says when it refuses, as errors a user can act on: one table for every command."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from botocore import exceptions
from botocore.exceptions import BotoCoreError, ClientError

from fleet.errors import ExitCode, FleetError

# Codes as AWS documents them for EC2, S3, Systems Manager and STS: they differ by service for the same cause.
_CREDENTIALS = {
    "AuthFailure",
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidToken",
    "RequestExpired",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
}
_DENIED = {"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "Forbidden", "403"}
_THROTTLED = {
    "RequestLimitExceeded",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "RateExceeded",
    "TooManyRequestsException",
}
_QUOTA = {"InstanceLimitExceeded", "VcpuLimitExceeded", "MaxSpotInstanceCountExceeded", "DocumentLimitExceeded"}
_CAPACITY = {"InsufficientInstanceCapacity", "SpotMaxPriceTooLow", "UnfulfillableCapacity"}
_ELSEWHERE = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "301"}

_NO_CREDENTIALS = (
    exceptions.NoCredentialsError,
    exceptions.PartialCredentialsError,
    exceptions.ProfileNotFound,
    exceptions.CredentialRetrievalError,
    exceptions.TokenRetrievalError,
    exceptions.UnauthorizedSSOTokenError,
)
_NO_REGION = (exceptions.NoRegionError, exceptions.InvalidRegionError)


@contextlib.contextmanager
def told(where: str, *, who: str = "runner") -> Iterator[None]:
    """Raises what AWS refuses inside as a FleetError; `where` names the call's object (a region, bucket, instance)."""
    try:
        yield
    except (ClientError, BotoCoreError) as error:
        raise explained(error, where=where, who=who) from error


def code_of(error: BaseException) -> str:
    """AWS's own code of an error, empty where it has none."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def explained(error: Exception, *, where: str, who: str = "runner") -> FleetError:
    """The error in the house form, with AWS's own words and the exit code that its cause has.

    Credentials, region and names are bad input (2); what the account may not do or have is refused (6); what may
    work later, throttling, capacity and the network, is unreachable (3).
    """
    code, text = code_of(error), " ".join(str(error).split())

    def house(what: str, mend: str, exit_code: ExitCode) -> FleetError:
        return FleetError(f"{what}: {text}", where=where, mend=mend, code=exit_code, who=who)

    if isinstance(error, _NO_CREDENTIALS) or code in _CREDENTIALS:
        return house(
            "AWS takes no credentials from here", "aws sts get-caller-identity; then aws sso login", ExitCode.BAD_INPUT
        )
    if isinstance(error, _NO_REGION):
        return house("no region, and one is wanted", "export AWS_DEFAULT_REGION=us-east-1", ExitCode.BAD_INPUT)
    if isinstance(error, (exceptions.EndpointConnectionError, exceptions.HTTPClientError)):
        return house(
            "AWS does not answer here: a wrong region's name, or no network",
            "aws ec2 describe-regions --all-regions --output table",
            ExitCode.UNREACHABLE,
        )
    if code in _THROTTLED:
        return house("AWS slowed this account down, and went on doing so", "run it again later", ExitCode.UNREACHABLE)
    if code in _DENIED:
        return house("AWS does not allow it", "compare with the policies in docs/policies", ExitCode.REFUSED)
    if code in _QUOTA:
        return house(
            "the account's quota is used up", "aws service-quotas list-service-quotas --service-code ec2",
            ExitCode.REFUSED,
        )  # fmt: skip
    if code in _CAPACITY:
        return house(
            "AWS has no such instance to give now", "try another zone or type, or on demand", ExitCode.UNREACHABLE
        )
    if code in _ELSEWHERE:
        return house(
            "the bucket is in another region", "aws s3api get-bucket-location --bucket NAME", ExitCode.BAD_INPUT
        )
    if code in ("NoSuchBucket", "InvalidBucketName"):
        return house("no such bucket", "aws s3 ls", ExitCode.BAD_INPUT)
    return house(f"AWS refused with {code or type(error).__name__}", "see AWS's own words above", ExitCode.HOST_FAILED)
