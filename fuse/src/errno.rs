//! The errno that a program gets when the namespace refuses an operation.
//!
//! Owns: the errno of each refusal. Does not own: when an operation is refused (the namespace).
//!
//! There is no wildcard: a new refusal must be given its errno here before the crate compiles.

use fuser::Errno;
use std::io;
use tidemark_namespace::FsError;
use tidemark_tier1::is_descriptor_limit;

/// Returns the errno of a failed read or write of a backing file. A budget without room reports that without an errno of its own.
pub(crate) fn io_errno(error: io::Error) -> Errno {
    if is_descriptor_limit(&error) {
        return errno(FsError::too_many_open());
    }
    if error.kind() == io::ErrorKind::StorageFull { Errno::ENOSPC } else { error.into() }
}

/// Returns the errno of a refusal.
pub(crate) fn errno(error: FsError) -> Errno {
    match error {
        FsError::NotFound => Errno::ENOENT,
        FsError::Exists => Errno::EEXIST,
        FsError::NotEmpty => Errno::ENOTEMPTY,
        FsError::NotDirectory => Errno::ENOTDIR,
        FsError::IsDirectory => Errno::EISDIR,
        // With `NeverFits` no call waits for room.
        FsError::NoSpace | FsError::NeverFits => Errno::ENOSPC,
        // This process has too many open, which no errno says. ENFILE would send people to the whole system's table (fs.file-max); `status`
        // names the limit that was reached.
        FsError::TooManyOpen => Errno::EMFILE,
        FsError::NameTooLong => Errno::ENAMETOOLONG,
        // The kernel looks the name up again and retries the open once (fs/namei.c, path_openat's callers).
        FsError::Stale => Errno::ESTALE,
        FsError::Io => Errno::EIO,
        FsError::Invalid => Errno::EINVAL,
        FsError::NoAttribute => Errno::ENODATA,
        // Never ENOSYS: the kernel remembers that for the life of the mount and stops asking.
        FsError::Unsupported => Errno::EOPNOTSUPP,
        FsError::Busy => Errno::EBUSY,
        FsError::Running => Errno::ETXTBSY,
        FsError::TooBig => Errno::EFBIG,
        // A buffer for an extended attribute that is too small, and only that, is ERANGE in xattr(7).
        FsError::Range => Errno::ERANGE,
        FsError::NotPermitted => Errno::EPERM,
        FsError::CrossDevice => Errno::EXDEV,
        FsError::ReadOnly => Errno::EROFS,
        FsError::BadHandle => Errno::EBADF,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_budget_is_told_from_damage_whether_we_refuse_or_the_kernel_does() {
        let code = |error: io::Error| io_errno(error).code();
        assert_eq!(code(io::ErrorKind::StorageFull.into()), libc::ENOSPC);
        assert_eq!(code(io::Error::from_raw_os_error(libc::ENOSPC)), libc::ENOSPC);
        assert_eq!(code(io::ErrorKind::UnexpectedEof.into()), libc::EIO);
    }
}
