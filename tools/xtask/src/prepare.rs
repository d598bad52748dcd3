//! Installing what a suite needs: Debian packages, a kernel for a guest, programs from the Rust registry, Python environments.
//!
//! Owns: the versions that are pinned (with each suite's `requirements*.txt`), the stamp of an environment that is up to date,
//! and the thread that installs while other checks run. Does not own: the Rust toolchain, which it never touches.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result, bail};

use crate::machine;
use crate::shell::{capture, say, watch_some, works};
use crate::workspace::Workspace;

/// The package that always names the newest kernel of this Debian: 6.1 in bookworm.
const KERNEL_PACKAGE: &str = "linux-image-amd64";
/// Written last; holds what the environment was made from, so that a change of it makes a new one.
const STAMP: &str = "tidemark-stamp";

/// Imports that must work before an environment counts as made.
const IMPORTS: &str = "import numpy, safetensors.torch, torch, transformers, accelerate, deepspeed, lightning, \
                       peft, h5py, optree, rich, orbax.checkpoint, torch_checkpointing; print(torch.__version__)";

/// Something that is installed for a suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tool {
    /// `fusermount3`, for mounts of a user who is not root.
    Fuse3,
    /// `getfattr` and `setfattr`.
    Attr,
    /// A real etcd, and its command line to look into it.
    Etcd,
    /// The POSIX test suite of that name.
    Pjdfstest,
    /// The file system exerciser. The program is under the APSL: built apart, only ever run, never linked or shipped.
    Fsx,
    /// An emulator, and Debian's kernel to boot in it, which is unpacked and not installed.
    Guest,
    /// `ip`, `tc` and `nft` for networks of hosts, and iperf3 as a measure of their links.
    Network,
    /// A virtual environment with torch and the frameworks of which the suite has scripts.
    PythonWithTorch,
    /// The same environment again, with the wheel of `tools/python` and the packages that test it.
    Wheel,
    /// A virtual environment with moto, an S3 server that others wrote.
    PythonWithMoto,
    /// NVIDIA's run-time compiler: device code compiles without a device.
    Nvrtc,
}

/// Tools that are being installed, one after the other, while the checks before the suites run: installing waits for
/// the network and the disk, where the build does not.
#[derive(Debug)]
pub(crate) struct Installing {
    thread: Option<JoinHandle<Failures>>,
    failures: Failures,
}

/// Tools that could not be installed, and why.
type Failures = Vec<(Tool, String)>;

impl Installing {
    /// Begins. A tool that is named twice is found there the second time.
    pub(crate) fn start(tools: Vec<Tool>, workspace: Arc<Workspace>) -> Self {
        let work = move || {
            let failed = |tool| Some((tool, format!("{:#}", install(tool, &workspace).err()?)));
            tools.into_iter().filter_map(failed).collect()
        };
        Self { thread: Some(thread::spawn(work)), failures: vec![] }
    }

    /// Waits until all is installed. Gives what is wrong with the first of `tools` that could not be.
    pub(crate) fn wait(&mut self, tools: &[Tool]) -> Result<Option<&str>> {
        if let Some(thread) = self.thread.take() {
            self.failures = thread.join().ok().context("the thread that installs has panicked")?;
        }
        let failed = self.failures.iter().find(|(tool, _)| tools.contains(tool));
        Ok(failed.map(|(_, why)| why.as_str()))
    }
}

/// Installs a tool unless it is there.
fn install(tool: Tool, workspace: &Workspace) -> Result<()> {
    match tool {
        Tool::Fuse3 => debian(&["fuse3"], || works(Command::new("fusermount3").arg("-V"))),
        Tool::Attr => debian(&["attr"], || works(Command::new("getfattr").arg("--version"))),
        Tool::Etcd => {
            debian(&["etcd-server"], || works(Command::new("etcd").arg("--version")))?;
            debian(&["etcd-client"], || works(Command::new("etcdctl").arg("version")))
        }
        Tool::Pjdfstest => {
            debian(&["gcc"], || works(Command::new("gcc").arg("--version")))?;
            debian(&["libacl1-dev"], || Path::new("/usr/include/sys/acl.h").exists())?;
            program("pjdfstest", "0.2.2", workspace)
        }
        Tool::Fsx => program("fsx", "0.3.2", workspace),
        Tool::Guest => {
            debian(&["qemu-system-x86"], || works(Command::new("qemu-system-x86_64").arg("--version")))?;
            debian(&["busybox-static"], || works(Command::new("dpkg").args(["-s", "busybox-static"])))?;
            debian(&["cpio", "kmod", "binutils"], || {
                ["cpio", "depmod", "strip"].iter().all(|name| works(Command::new(name).arg("--version")))
            })?;
            guest_kernel(workspace)
        }
        Tool::Network => {
            debian(&["iproute2"], || ["ip", "tc"].iter().all(|name| works(Command::new(name).arg("-V"))))?;
            debian(&["nftables"], || works(Command::new("nft").arg("-V")))?;
            debian(&["iperf3"], || works(Command::new("iperf3").arg("-v")))
        }
        Tool::PythonWithTorch => with_torch(workspace),
        Tool::Wheel => {
            with_torch(workspace)?;
            wheel(workspace)
        }
        Tool::PythonWithMoto => python(&WITH_MOTO, workspace),
        Tool::Nvrtc => python(&WITH_NVRTC, workspace),
    }
}

fn with_torch(workspace: &Workspace) -> Result<()> {
    // The stubs for CUDA's libraries are compiled and read with these.
    debian(&["gcc", "binutils"], || {
        ["gcc", "nm", "readelf"].iter().all(|name| works(Command::new(name).arg("--version")))
    })?;
    python(&WITH_TORCH, workspace)
}

/// Runs a program and shows its output when it fails: other checks print at the same time.
fn runs(command: &mut Command) -> Result<bool> {
    let ran = watch_some(command, |_| false)?;
    if !ran.success {
        say(&ran.output);
    }
    Ok(ran.success)
}

/// Installs Debian packages unless `present` says that what they bring is there.
fn debian(packages: &[&str], present: impl Fn() -> bool) -> Result<()> {
    if present() {
        return Ok(());
    }
    let names = packages.join(" ");
    if !machine::is_root() {
        bail!("{names} is not installed, and only root can: run `apt-get install {names}`");
    }
    let install = || {
        let mut command = Command::new("apt-get");
        command.args(["install", "--yes", "--quiet", "--no-install-recommends"]).args(packages);
        runs(command.env("DEBIAN_FRONTEND", "noninteractive"))
    };
    // A fresh image has no package lists, and old lists name files that are gone: try, then update and try again.
    if !install()? {
        runs(Command::new("apt-get").args(["update", "--quiet"]))?;
        install()?;
    }
    if present() { Ok(()) } else { bail!("apt-get did not install {names}; its output is above") }
}

/// Builds `<target>/tools/NAME/bin/NAME` from the registry, once, and again when the pinned version changes.
fn program(name: &str, version: &str, workspace: &Workspace) -> Result<()> {
    let root = workspace.tools_dir().join(name);
    let binary = root.join("bin").join(name);
    let wanted = format!("{name} {version}");
    let present =
        || capture(Command::new(&binary).arg("--version")).is_ok_and(|found| found.trim() == wanted);
    if present() {
        return Ok(());
    }
    // A target directory of its own, so that what it is built from does not lie among what we are built from.
    let build = workspace.tools_dir().join(format!("{name}-build"));
    let mut install = Command::new("cargo");
    install.args(["install", name, "--version", version, "--locked", "--force", "--root"]).arg(&root);
    // The programs run for seconds: optimising them would take longer than they run.
    install.env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1").env("CARGO_PROFILE_RELEASE_LTO", "off");
    let built = runs(install.arg("--target-dir").arg(&build))?;
    if build.exists() {
        fs::remove_dir_all(&build).with_context(|| format!("removing {}", build.display()))?;
    }
    if built && present() {
        Ok(())
    } else {
        bail!("cargo install did not bring {wanted}; its output is above")
    }
}

/// Unpacks Debian's kernel package into `<target>/tools/guest-kernel`, with the list of what each module needs.
fn guest_kernel(workspace: &Workspace) -> Result<()> {
    let root = workspace.tools_dir().join("guest-kernel");
    if root.join("boot").exists() {
        return Ok(());
    }
    // The name of the package has the kernel's version in it; the package without one depends on it.
    let package = || -> Result<String> {
        let text = capture(Command::new("apt-cache").args(["depends", KERNEL_PACKAGE]))?;
        let depends = text.lines().find_map(|line| line.trim().strip_prefix("Depends: linux-image-"));
        Ok(format!("linux-image-{}", depends.context("it depends on no kernel")?))
    };
    let package = match package() {
        Ok(package) => package,
        Err(_) => {
            runs(Command::new("apt-get").args(["update", "--quiet"]))?;
            package().with_context(|| format!("asking apt for {KERNEL_PACKAGE}"))?
        }
    };
    let unpacked = workspace.tools_dir().join("guest-kernel-unpacked");
    if unpacked.exists() {
        fs::remove_dir_all(&unpacked).with_context(|| format!("removing {}", unpacked.display()))?;
    }
    fs::create_dir_all(&unpacked).with_context(|| format!("making {}", unpacked.display()))?;
    // As root: the user that apt downloads as may not write here.
    let mut download = Command::new("apt-get");
    download.args(["download", "--quiet", "-o", "APT::Sandbox::User=root", &package]);
    kernel_step(download.current_dir(&unpacked))?;
    kernel_step(Command::new("sh").args(["-c", "dpkg -x *.deb . && rm *.deb"]).current_dir(&unpacked))?;
    let version = package.trim_start_matches("linux-image-");
    kernel_step(Command::new("depmod").arg("-b").arg(&unpacked).arg(version))?;
    // Renamed last, so that what is there is whole.
    fs::rename(&unpacked, &root).with_context(|| format!("renaming {}", unpacked.display()))
}

fn kernel_step(command: &mut Command) -> Result<()> {
    if runs(command)? { Ok(()) } else { bail!("the guest's kernel is not there; the output is above") }
}

/// Sources of a Python environment.
struct Environment {
    /// Directory of the environment in `<target>/tools`.
    name: &'static str,
    /// Every package with its version.
    requirements: &'static str,
    /// Packages that are built here: their build asks torch, which only this environment has.
    from_source: Option<&'static str>,
    /// Runs in it when the packages are there, and puts stubs in the place of libraries that are not needed.
    stubs: Option<&'static str>,
    /// Python code that must work in the environment.
    check: &'static str,
}

const WITH_TORCH: Environment = Environment {
    name: "venv",
    requirements: "tests/frameworks/requirements.txt",
    from_source: Some("tests/frameworks/requirements-source.txt"),
    // In the place of the gigabytes of CUDA libraries that torch names.
    stubs: Some("tests/torch_cpu_stub.py"),
    check: IMPORTS,
};

const WITH_MOTO: Environment = Environment {
    name: "moto-venv",
    requirements: "tests/s3/requirements.txt",
    from_source: None,
    stubs: None,
    check: "import moto.server, moto.s3.urls; print(moto.__version__)",
};

const WITH_NVRTC: Environment = Environment {
    name: "nvrtc-venv",
    requirements: "kernels/requirements.txt",
    from_source: None,
    stubs: None,
    check: "import nvidia",
};

const WITH_WHEEL: Environment = Environment {
    name: "wheel-venv",
    requirements: "tools/python/requirements.txt",
    from_source: None,
    stubs: None,
    check: "import maturin, pytest",
};

/// Where the library of [`Tool::Nvrtc`] lies.
pub(crate) fn nvrtc_folder(workspace: &Workspace) -> Result<PathBuf> {
    let interpreter = workspace.tools_dir().join(WITH_NVRTC.name).join("bin/python");
    Ok(Path::new(packages(&interpreter)?.trim()).join("nvidia/cu13/lib"))
}

/// Builds the wheel as README of `tools/python` says, and installs it beside what the environment with torch has.
fn wheel(workspace: &Workspace) -> Result<()> {
    python(&WITH_WHEEL, workspace)?;
    let interpreter =
        |environment: &Environment| workspace.tools_dir().join(environment.name).join("bin/python");
    let link = Path::new(packages(&interpreter(&WITH_WHEEL))?.trim()).join("with-torch.pth");
    fs::write(&link, packages(&interpreter(&WITH_TORCH))?)
        .with_context(|| format!("writing {}", link.display()))?;
    let mut install = pip(&interpreter(&WITH_WHEEL));
    // Unchanged crates are not compiled again.
    install.env("CARGO_TARGET_DIR", workspace.tools_dir().join("wheel-build"));
    install.env("MATURIN_PEP517_ARGS", "--locked");
    // pip finds maturin there.
    let bin = workspace.tools_dir().join(WITH_WHEEL.name).join("bin");
    let path = std::env::var_os("PATH").unwrap_or_default();
    install.env("PATH", std::env::join_paths([bin].into_iter().chain(std::env::split_paths(&path)))?);
    step(install.args(["--no-build-isolation", "--force-reinstall"]).arg(workspace.root.join("tools/python")))
}

/// Makes `<target>/tools/NAME`, or keeps it when it was made from the same versions and the same stubs.
fn python(environment: &Environment, workspace: &Workspace) -> Result<()> {
    debian(&["python3", "python3-venv"], || works(Command::new("python3").args(["-c", "import ensurepip"])))?;
    let requirements = workspace.root.join(environment.requirements);
    let from_source = environment.from_source.map(|source| workspace.root.join(source));
    let stubs = environment.stubs.map(|stubs| workspace.root.join(stubs));
    let venv = workspace.tools_dir().join(environment.name);
    let interpreter = venv.join("bin/python");

    let version = capture(Command::new("python3").arg("--version"))?;
    let mut made_from = [version, read(&requirements)?].join("\n");
    for further in from_source.iter().chain(&stubs) {
        made_from.push('\n');
        made_from.push_str(&read(further)?);
    }
    let stamp = venv.join(STAMP);
    if fs::read_to_string(&stamp).is_ok_and(|found| found == made_from) {
        return collect_less(&interpreter);
    }
    if venv.exists() {
        say(&format!("{} was made from other versions: making it again", venv.display()));
        fs::remove_dir_all(&venv).with_context(|| format!("removing {}", venv.display()))?;
    }
    fs::create_dir_all(workspace.tools_dir())?;
    step(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
    step(pip(&interpreter).arg("--requirement").arg(&requirements))?;
    if let Some(stubs) = stubs {
        step(Command::new(&interpreter).arg(&stubs))?;
    }
    if let Some(from_source) = from_source {
        let mut build = pip(&interpreter);
        // DeepSpeed compiles nothing then.
        build.env("DS_BUILD_OPS", "0").env("DS_ACCELERATOR", "cpu");
        step(build.arg("--no-build-isolation").arg("--requirement").arg(&from_source))?;
    }
    step(Command::new(&interpreter).args(["-c", environment.check]))?;
    collect_less(&interpreter)?;
    fs::write(&stamp, made_from).with_context(|| format!("writing {}", stamp.display()))
}

/// Has Python look for garbage less often. Importing a framework makes a million objects and no garbage, and the search for some
/// took an eighth of the time that the suites spend in Python.
fn collect_less(interpreter: &Path) -> Result<()> {
    let file = Path::new(packages(interpreter)?.trim()).join("collect-less.pth");
    fs::write(&file, "import gc; gc.set_threshold(20000, 20, 20)\n")
        .with_context(|| format!("writing {}", file.display()))
}

/// The directory that an interpreter's packages lie in.
fn packages(interpreter: &Path) -> Result<String> {
    let ask = ["-c", "import sysconfig; print(sysconfig.get_path('purelib'))"];
    capture(Command::new(interpreter).args(ask))
}

/// `pip install` without dependencies: every package that is needed is named with its version, and no other comes in.
fn pip(interpreter: &Path) -> Command {
    let mut pip = Command::new(interpreter);
    pip.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-cache-dir",
        // Most of what is installed is never imported; the suites keep what is compiled when it is (`tools/pycache`).
        "--no-compile",
        "--disable-pip-version-check",
    ]);
    pip
}

fn step(command: &mut Command) -> Result<()> {
    if runs(command)? {
        Ok(())
    } else {
        bail!("a step of the Python environment failed; its output is above")
    }
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))
}
