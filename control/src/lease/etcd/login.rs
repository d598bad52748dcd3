//! The user of an etcd: its password, and the token that etcd issued for it.
//!
//! Owns: reading the password, the token, how often a refused password is sent. Does not own: sending anything (`client`).
//!
//! The password is read for each login and not kept, so that a file that is replaced counts from then on. Neither password nor
//! token is in any `Debug`.

use super::error::{EtcdError, PasswordError};
use hyper::header::HeaderValue;
use rustix::fs::OFlags;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The longest password file: a longer one is another file by mistake.
const PASSWORD_BYTES_MAX: usize = 4 << 10;

/// Pause between two logins with a password that etcd has refused. A candidate asks five times a second, and etcd hashes each password it
/// receives, some 70 ms of a processor.
const REFUSED_PAUSE: Duration = Duration::from_secs(10);

/// Permission bits that a file with a secret must not have.
const OTHERS: u32 = 0o077;

/// A user of an etcd.
pub(super) struct Login {
    pub(super) user: String,
    pub(super) file: PathBuf,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    session: Option<Session>,
    refused: Option<Refused>,
}

/// The result of a login.
#[derive(Clone)]
pub(super) enum Session {
    /// etcd has no authentication: requests go without a token, as those of etcdctl do.
    Open,
    Token(HeaderValue),
}

struct Refused {
    password: Password,
    at: Instant,
    endpoint: String,
    words: String,
}

#[derive(Clone, PartialEq, Eq)]
pub(super) struct Password(String);

impl Password {
    /// Returns the secret, for the request that sends it, and nothing else.
    pub(super) fn reveal(&self) -> &str {
        &self.0
    }
}

impl Login {
    /// # Errors
    /// The password cannot be read.
    pub(super) fn open(user: &str, file: &Path) -> Result<Self, PasswordError> {
        read_password(file)?;
        Ok(Self { user: user.to_owned(), file: file.to_owned(), state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the result of the last login, unless it was ended since.
    pub(super) fn session(&self) -> Option<Session> {
        self.state().session.clone()
    }

    pub(super) fn begin_session(&self, session: Session) {
        *self.state() = State { session: Some(session), refused: None };
    }

    pub(super) fn end_session(&self) {
        self.state().session = None;
    }

    /// Reads the password to send.
    ///
    /// # Errors
    /// The password cannot be read, or etcd has refused the same one a moment ago.
    pub(super) async fn password(&self) -> Result<Password, EtcdError> {
        let file = self.file.clone();
        // A file may lie on a slow disk.
        let read = tokio::task::spawn_blocking(move || read_password(&file));
        let password = read.await.expect("reading a password does not panic")?;
        match &self.state().refused {
            Some(refused) if refused.password == password && refused.at.elapsed() < REFUSED_PAUSE => {
                Err(self.wrong_password(refused.endpoint.clone(), refused.words.clone()))
            }
            Some(_) | None => Ok(password),
        }
    }

    /// Notes that etcd refused `password`; returns the error that says so.
    pub(super) fn refuse(&self, password: Password, endpoint: String, words: String) -> EtcdError {
        let error = self.wrong_password(endpoint.clone(), words.clone());
        self.state().refused = Some(Refused { password, at: Instant::now(), endpoint, words });
        error
    }

    fn wrong_password(&self, endpoint: String, words: String) -> EtcdError {
        EtcdError::WrongPassword { endpoint, user: self.user.clone(), file: self.file.clone(), words }
    }
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Login").field("user", &self.user).field("file", &self.file).finish_non_exhaustive()
    }
}

/// Reads a password, without the newline at its end.
fn read_password(path: &Path) -> Result<Password, PasswordError> {
    let failed = |source| PasswordError::Read { path: path.to_owned(), source };
    let refused = |what: String| PasswordError::Content { path: path.to_owned(), what };
    // Otherwise opening a pipe would block.
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file: File = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(failed)?;
    let found = file.metadata().map_err(failed)?;
    if !found.is_file() {
        return Err(refused("is no file".to_owned()));
    }
    if found.mode() & OTHERS != 0 {
        return Err(refused(format!(
            "has mode {:04o}, with which other users may use it; take their permission away (chmod go= {})",
            found.mode() & 0o7777,
            path.display()
        )));
    }
    let mut text = String::new();
    let limit = u64::try_from(PASSWORD_BYTES_MAX).expect("a few KiB") + 1;
    file.take(limit).read_to_string(&mut text).map_err(failed)?;
    if text.len() > PASSWORD_BYTES_MAX {
        return Err(refused(format!("has more than {PASSWORD_BYTES_MAX} bytes; is it the right file?")));
    }
    let password = text.strip_suffix('\n').unwrap_or(&text);
    let password = password.strip_suffix('\r').unwrap_or(password);
    if password.is_empty() {
        return Err(refused("is empty; write the password of etcd's user into it".to_owned()));
    }
    Ok(Password(password.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    fn file(text: &[u8], mode: u32) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("password");
        fs::write(&path, text).expect("written");
        fs::set_permissions(&path, Permissions::from_mode(mode)).expect("a mode");
        (folder, path)
    }

    #[test]
    fn a_password_loses_the_newline_at_its_end_and_nothing_else() {
        for (text, password) in
            [(&b"a b\n"[..], "a b"), (b"secret", "secret"), (b" x\r\n", " x"), (b"x\n\n", "x\n")]
        {
            let (_folder, path) = file(text, 0o400);
            assert_eq!(read_password(&path).expect("it can be used").reveal(), password);
        }
    }

    #[test]
    fn a_password_that_others_may_read_or_that_is_none_is_refused_and_not_repeated() {
        for (text, mode, words) in [
            (&b"hunter2"[..], 0o640, "mode 0640"),
            (b"hunter2", 0o604, "chmod go="),
            (b"\n", 0o600, "is empty"),
            (&b"hunter2".repeat(1000)[..], 0o600, "4096 bytes"),
            (b"hunter2\xff", 0o600, "cannot be read"),
        ] {
            let (_folder, path) = file(text, mode);
            let error = Login::open("user", &path).expect_err("it cannot be used");
            let (shown, debug) = (error.to_string(), format!("{error:?}"));
            assert!(shown.contains(words) && shown.contains(&path.display().to_string()), "{shown}");
            assert!(!shown.contains("hunter") && !debug.contains("hunter"), "{shown} {debug}");
        }
        let folder = tempfile::tempdir().expect("a folder");
        assert!(read_password(folder.path()).err().expect("no file").to_string().contains("is no file"));
        assert!(matches!(read_password(&folder.path().join("none")), Err(PasswordError::Read { .. })));
    }

    #[tokio::test]
    async fn a_refused_password_is_not_sent_again_at_once_and_another_is() {
        let (_folder, path) = file(b"hunter2", 0o600);
        let login = Login::open("user", &path).expect("it can be used");
        let sent = login.password().await.expect("sent");
        let error = login.refuse(sent, "etcd-1:2379".to_owned(), "invalid".to_owned());
        let again = login.password().await.err().expect("refused a moment ago");
        assert_eq!(error.to_string(), again.to_string());
        assert!(again.to_string().contains("etcd-1:2379"), "{again}");
        assert!(!format!("{again} {again:?} {login:?}").contains("hunter"), "{again:?} {login:?}");
        fs::write(&path, "another").expect("written");
        assert_eq!(login.password().await.expect("another one").reveal(), "another");
    }
}
