//! Shared by all commands: the daemon, the place for output, and the ways to fail.
//!
//! Owns: reaching the daemon, placing typed paths on its mount, writing JSON. Does not own: what is written.

use crate::args::{Common, Format};
use serde::Serialize;
use std::ffi::OsStr;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use tidemark_api::StatusRequest;
use tidemark_api::client::{Client, ClientError};
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
        place_on(mount, &working_directory(), path, Means::Path)
    }

    /// A name for something on the daemon's mount: nothing of that name need be there.
    pub(crate) async fn name(&mut self, name: &OsStr) -> Result<Place, Failure> {
        let mount = self.mount().await?;
        place_on(mount, &working_directory(), name, Means::Name)
    }

    /// CHECKPOINT as typed.
    pub(crate) async fn selector(&mut self, text: &OsStr) -> Result<Selector, Failure> {
        self.selector_by(text, Means::Path).await
    }

    /// CHECKPOINT as typed, where a path that is a link is not taken for what it leads to.
    pub(crate) async fn selector_of_name(&mut self, text: &OsStr) -> Result<Selector, Failure> {
        self.selector_by(text, Means::PathItself).await
    }

    async fn selector_by(&mut self, text: &OsStr, path_means: Means) -> Result<Selector, Failure> {
        match Typed::parse(text.as_bytes())? {
            Typed::Latest => Ok(Selector::Latest),
            Typed::Step(step) => Ok(Selector::Step(step)),
            typed @ (Typed::LatestOf(_) | Typed::StepOf(..) | Typed::At(_)) => {
                let means = if matches!(typed, Typed::At(_)) { path_means } else { Means::Name };
                let mount = self.mount().await?;
                typed.place(|path| place_on(mount, &working_directory(), OsStr::from_bytes(path), means))
            }
        }
    }

    async fn mount(&mut self) -> Result<&Path, Failure> {
        let mount = match self.mount.take() {
            Some(mount) => mount,
            None => self.client.get(StatusRequest).await?.mount.path.into(),
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

/// Meaning of a typed path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Means {
    /// A path as a person sees it: if the working directory is not on the mount and has the path, that path is meant.
    Path,
    /// The same, but a link outside of the mount that is the last name is meant itself, not its target.
    PathItself,
    /// A run, or something to be made: people know it by that name wherever they are.
    Name,
}

fn working_directory() -> PathBuf {
    std::env::current_dir().unwrap_or_else(|_| PathBuf::from("/"))
}

/// Places a typed path on the mount. By text first, which never touches the mount: the daemon follows links in the text. If the text
/// leads elsewhere, links are followed here. A relative path begins at `cwd` when that is on the mount, else at the mount's root. The
/// path is refused if the person may mean something else: `cwd` is on the mount by another path, or has a file of that path.
fn place_on(mount: &Path, cwd: &Path, path: &OsStr, means: Means) -> Result<Place, Failure> {
    let by_text = |path: &OsStr| {
        Place::typed(mount.as_os_str().as_bytes(), cwd.as_os_str().as_bytes(), path.as_bytes())
    };
    let outside = match by_text(path) {
        Err(outside @ PlaceError::Outside { .. }) => outside,
        placed => return Ok(placed?),
    };
    let here = cwd.join(path);
    let real = match (means, here.parent(), here.file_name()) {
        (Means::PathItself, Some(parent), Some(name)) => followed(parent).join(name),
        _ => followed(&here),
    };
    if let Ok(place) = by_text(real.as_os_str()) {
        return Ok(place);
    }
    if Path::new(path).is_absolute() {
        return Err(outside.into());
    }
    let place = Place::relative(path.as_bytes()).map_err(|_| outside)?;
    let is_there = means != Means::Name && here.symlink_metadata().is_ok();
    if is_there || is_on_mount(cwd, mount).unwrap_or(false) {
        return Err(Failure::NamedHere { path: here, on_mount: mount.join(path) });
    }
    Ok(place)
}

/// The path with the symbolic links of as much of it as is there followed: what is to be brought back is not there.
fn followed(path: &Path) -> PathBuf {
    let real = path.ancestors().find_map(|above| Some((above, above.canonicalize().ok()?)));
    let Some((above, real)) = real else { return path.to_owned() };
    match path.strip_prefix(above) {
        Ok(rest) if !rest.as_os_str().is_empty() => real.join(rest),
        Ok(_) | Err(_) => real,
    }
}

/// Whether a directory lies on what is mounted at `mount`, by whatever path: the device shows it, also through a bind mount. False if
/// nothing is mounted there any more.
///
/// # Errors
/// The metadata of `directory`, `mount` or the directory above it cannot be read.
pub(crate) fn is_on_mount(directory: &Path, mount: &Path) -> io::Result<bool> {
    let device = |path: &Path| Ok::<_, io::Error>(path.metadata()?.dev());
    let mounted = device(mount)?;
    let is_mounted =
        mount.parent().map_or(Ok(true), |above| Ok::<_, io::Error>(device(above)? != mounted))?;
    Ok(is_mounted && device(directory)? == mounted)
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
    /// A relative path that may mean what is here, where the mount is not.
    NamedHere {
        path: PathBuf,
        on_mount: PathBuf,
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
            Self::Place(_)
            | Self::Selector(_)
            | Self::Directory { .. }
            | Self::NotOnMount { .. }
            | Self::NamedHere { .. } => ExitCode::Usage,
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
            Self::NamedHere { path, on_mount } => {
                let (path, on_mount) = (path.display(), on_mount.display());
                write!(f, "{path} is not below the mount's own path: if you mean {on_mount}, write that")
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
            Self::Place(_)
            | Self::Selector(_)
            | Self::Directory { .. }
            | Self::NotOnMount { .. }
            | Self::NamedHere { .. } => None,
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
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_link_outside_of_the_mount_leads_into_it_unless_it_is_meant_itself() {
        let home = tempfile::tempdir().unwrap();
        let home = home.path().canonicalize().unwrap();
        let mount = home.join("mount");
        fs::create_dir_all(mount.join("run")).unwrap();
        fs::write(mount.join("run/step1.pt"), b"").unwrap();
        symlink(&mount, home.join("there")).unwrap();
        symlink(mount.join("run/step1.pt"), home.join("best")).unwrap();
        let placed = |path: &Path, means| {
            let place = place_on(&mount, &home, path.as_os_str(), means);
            place.map(|place| String::from_utf8(place.as_bytes().to_vec()).unwrap())
        };
        for means in [Means::Path, Means::PathItself] {
            for path in ["mount/run/step1.pt", "there/run/step1.pt"] {
                assert_eq!(placed(&home.join(path), means).unwrap(), "run/step1.pt", "{path}, {means:?}");
                assert_eq!(placed(Path::new(path), means).unwrap(), "run/step1.pt", "{path}, {means:?}");
            }
            // A path to bring back does not exist yet.
            assert_eq!(placed(&home.join("there/run/gone.pt"), means).unwrap(), "run/gone.pt", "{means:?}");
        }
        assert_eq!(placed(&home.join("best"), Means::Path).unwrap(), "run/step1.pt");
        let itself = placed(&home.join("best"), Means::PathItself);
        assert!(matches!(itself, Err(Failure::Place(PlaceError::Outside { .. }))));
        let itself = placed(Path::new("best"), Means::PathItself);
        assert!(matches!(itself, Err(Failure::NamedHere { .. })), "not `best` of the mount's root");
    }

    #[test]
    fn a_path_is_placed_by_what_it_leads_to_and_refused_where_it_may_mean_another_thing() {
        let home = tempfile::tempdir().unwrap();
        let home = home.path().canonicalize().unwrap();
        let (mount, outside) = (home.join("data/ckpt"), home.join("elsewhere"));
        fs::create_dir_all(mount.join("run")).unwrap();
        fs::create_dir_all(outside.join("logs")).unwrap();
        symlink(&mount, home.join("ckpt")).unwrap();
        symlink(mount.join("run"), outside.join("linked")).unwrap();
        let placed = |cwd: &Path, path: &str, means| {
            place_on(&mount, cwd, OsStr::new(path), means).map(|place| place.as_bytes().to_vec())
        };
        let through = |path: &str| home.join("ckpt").join(path).to_str().unwrap().to_owned();
        for (cwd, path, expected) in [
            (&outside, through("run").as_str(), "run"),
            // Nothing is there yet, or any more.
            (&outside, through("run/step1.pt").as_str(), "run/step1.pt"),
            (&outside, "linked/step1.pt", "run/step1.pt"),
            (&outside, "run//step1.pt", "run/step1.pt"),
            (&mount.join("run"), "step1.pt", "run/step1.pt"),
            (&mount.join("run"), "../logs", "logs"),
        ] {
            for means in [Means::Path, Means::PathItself] {
                let found = placed(cwd, path, means);
                assert_eq!(found.ok().as_deref(), Some(expected.as_bytes()), "{path} in {}", cwd.display());
            }
        }
        for path in ["logs", ".", "..", "../elsewhere/logs"] {
            for means in [Means::Path, Means::PathItself] {
                let refused = placed(&outside, path, means);
                assert_eq!(refused.unwrap_err().exit_code(), ExitCode::Usage, "{path}");
            }
        }
        assert_eq!(placed(&outside, "logs", Means::Name).unwrap(), b"logs", "a run is known by its name");
        assert!(placed(&outside, outside.join("logs").to_str().unwrap(), Means::Name).is_err());
    }

    #[test]
    fn what_is_no_mount_has_nothing_on_it() {
        let home = tempfile::tempdir().unwrap();
        fs::create_dir(home.path().join("ckpt")).unwrap();
        let mount = home.path().join("ckpt");
        assert!(!is_on_mount(&mount, &mount).unwrap(), "it was unmounted");
        assert!(is_on_mount(home.path(), &home.path().join("absent")).is_err());
        assert!(is_on_mount(Path::new("/proc/self"), Path::new("/proc")).unwrap());
    }
}
