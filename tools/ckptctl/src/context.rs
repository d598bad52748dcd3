//! What every command has: the daemon, the place for output, and the ways to fail.
//!
//! Owns: reaching the daemon, placing typed paths on its mount, writing JSON. Does not own: what is written.

use crate::args::{Common, Format};
use serde::Serialize;
use std::ffi::OsStr;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use tidemark_control::client::{Client, ClientError};
use tidemark_protocol::report::ExitCode;
use tidemark_protocol::selector::{Place, PlaceError, Selector, SelectorError, Typed};
use tidemark_transport::certs::CertError;

#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) client: Client,
    pub(crate) state_dir: PathBuf,
    pub(crate) format: Format,
    /// Where the daemon has its mount, once it was asked.
    mount: Option<PathBuf>,
}

impl Context {
    pub(crate) fn new(common: Common) -> Self {
        let client = Client::of_state_dir(&common.state_dir);
        Self { client, state_dir: common.state_dir, format: common.output, mount: None }
    }

    /// A path as typed, or the mount's root when none was.
    pub(crate) async fn place_or_root(&mut self, path: Option<&OsStr>) -> Result<Place, Failure> {
        match path {
            Some(path) => self.place(path).await,
            None => Ok(Place::root()),
        }
    }

    /// A path as typed, on the daemon's mount.
    pub(crate) async fn place(&mut self, path: &OsStr) -> Result<Place, Failure> {
        let mount = self.mount().await?;
        place_on(mount, path, LastLink::Followed)
    }

    /// CHECKPOINT as typed.
    pub(crate) async fn selector(&mut self, text: &OsStr) -> Result<Selector, Failure> {
        self.selector_by(text, LastLink::Followed).await
    }

    /// CHECKPOINT as typed, where a path that is a link is not taken for what it leads to.
    pub(crate) async fn selector_of_name(&mut self, text: &OsStr) -> Result<Selector, Failure> {
        self.selector_by(text, LastLink::Kept).await
    }

    async fn selector_by(&mut self, text: &OsStr, last: LastLink) -> Result<Selector, Failure> {
        match Typed::parse(text.as_bytes())? {
            Typed::Latest => Ok(Selector::Latest),
            Typed::Step(step) => Ok(Selector::Step(step)),
            typed @ (Typed::LatestOf(_) | Typed::StepOf(..)) => {
                let mount = self.mount().await?;
                typed.place(|run| place_on(mount, OsStr::from_bytes(run), LastLink::Followed))
            }
            typed @ Typed::At(_) => {
                let mount = self.mount().await?;
                typed.place(|path| place_on(mount, OsStr::from_bytes(path), last))
            }
        }
    }

    async fn mount(&mut self) -> Result<&Path, Failure> {
        let mount = match self.mount.take() {
            Some(mount) => mount,
            None => self.client.status().await?.mount.path.into(),
        };
        Ok(self.mount.insert(mount))
    }

    /// Writes a report as JSON, or has `table` written.
    pub(crate) fn print<T: Serialize>(
        &self,
        report: &T,
        table: impl FnOnce(&T, &mut dyn Write) -> io::Result<()>,
    ) -> Result<(), Failure> {
        let mut out = anstream::stdout().lock();
        match self.format {
            Format::Table => table(report, &mut out)?,
            Format::Json => {
                serde_json::to_writer_pretty(&mut out, report).map_err(io::Error::from)?;
                writeln!(out)?;
            }
        }
        Ok(out.flush()?)
    }
}

/// What becomes of a link outside of the mount that is the last name of a path.
#[derive(Debug, Clone, Copy)]
enum LastLink {
    Followed,
    Kept,
}

/// By text first, which never touches the mount: links in it the daemon follows. Where the text leads elsewhere, links are followed here.
fn place_on(mount: &Path, path: &OsStr, last: LastLink) -> Result<Place, Failure> {
    let cwd = std::env::current_dir().unwrap_or_else(|_| PathBuf::from("/"));
    let on_mount = |path: &OsStr| {
        Place::typed(mount.as_os_str().as_bytes(), cwd.as_os_str().as_bytes(), path.as_bytes())
    };
    on_mount(path).or_else(|outside| match real_path(Path::new(path), last) {
        Ok(real) => on_mount(real.as_os_str()).map_err(Failure::from),
        Err(_) => Err(outside.into()),
    })
}

fn real_path(path: &Path, last: LastLink) -> io::Result<PathBuf> {
    match (last, path.parent(), path.file_name()) {
        (LastLink::Kept, Some(parent), Some(name)) => Ok(std::fs::canonicalize(parent)?.join(name)),
        _ => std::fs::canonicalize(path),
    }
}

/// Why a command was not done.
#[derive(Debug)]
pub(crate) enum Failure {
    Client(ClientError),
    Place(PlaceError),
    Selector(SelectorError),
    /// A directory that cannot be named to the daemon.
    Directory {
        directory: PathBuf,
    },
    /// A folder to measure as the mount that is not on it.
    NotOnMount {
        path: PathBuf,
        mount: PathBuf,
    },
    /// A measurement that could not be taken.
    Bench(anyhow::Error),
    Certificates {
        source: CertError,
    },
    Output {
        source: io::Error,
    },
    Runtime {
        source: io::Error,
    },
}

impl Failure {
    pub(crate) fn exit_code(&self) -> ExitCode {
        match self {
            Self::Client(error) => error.exit_code(),
            Self::Place(_) | Self::Selector(_) | Self::Directory { .. } | Self::NotOnMount { .. } => {
                ExitCode::Usage
            }
            Self::Output { source } if source.kind() == io::ErrorKind::BrokenPipe => ExitCode::Done,
            Self::Bench(_) | Self::Certificates { .. } | Self::Output { .. } | Self::Runtime { .. } => {
                ExitCode::Failed
            }
        }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Client(error) => error.fmt(f),
            Self::Place(error) => error.fmt(f),
            Self::Selector(error) => error.fmt(f),
            Self::Directory { directory } => {
                write!(f, "{:?} is no directory that can be said in text", directory.as_os_str())
            }
            Self::NotOnMount { path, mount } => {
                let (path, mount) = (path.display(), mount.display());
                write!(
                    f,
                    "{path} is not on the mount {mount}: give --path a folder there, such as {mount} itself"
                )
            }
            Self::Bench(error) => error.fmt(f),
            Self::Certificates { source } => source.fmt(f),
            Self::Output { .. } => f.write_str("cannot write the answer"),
            Self::Runtime { .. } => f.write_str("cannot start; this process may not open more files"),
        }
    }
}

impl std::error::Error for Failure {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Client(error) => error.source(),
            Self::Place(_) | Self::Selector(_) | Self::Directory { .. } | Self::NotOnMount { .. } => None,
            Self::Bench(error) => error.source(),
            Self::Certificates { source } => source.source(),
            Self::Output { source } | Self::Runtime { source } => Some(source),
        }
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        Self::Client(error)
    }
}

impl From<PlaceError> for Failure {
    fn from(error: PlaceError) -> Self {
        Self::Place(error)
    }
}

impl From<SelectorError> for Failure {
    fn from(error: SelectorError) -> Self {
        Self::Selector(error)
    }
}

impl From<io::Error> for Failure {
    fn from(source: io::Error) -> Self {
        Self::Output { source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_link_outside_of_the_mount_leads_into_it_unless_it_is_meant_itself() {
        let home = tempfile::tempdir().unwrap();
        let home = home.path().canonicalize().unwrap();
        let mount = home.join("mount");
        std::fs::create_dir_all(mount.join("run")).unwrap();
        std::fs::write(mount.join("run/step1.pt"), b"").unwrap();
        symlink(&mount, home.join("there")).unwrap();
        symlink(mount.join("run/step1.pt"), home.join("best")).unwrap();
        let placed = |path: &str, last| {
            let place = place_on(&mount, home.join(path).as_os_str(), last);
            place.map(|place| String::from_utf8(place.as_bytes().to_vec()).unwrap())
        };
        for last in [LastLink::Followed, LastLink::Kept] {
            assert_eq!(placed("mount/run/step1.pt", last).unwrap(), "run/step1.pt");
            assert_eq!(placed("there/run/step1.pt", last).unwrap(), "run/step1.pt", "{last:?}");
        }
        assert_eq!(placed("best", LastLink::Followed).unwrap(), "run/step1.pt");
        assert!(matches!(placed("best", LastLink::Kept), Err(Failure::Place(PlaceError::Outside { .. }))));
    }
}
