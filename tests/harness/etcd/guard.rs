//! Demands of a guarded etcd on its clients: TLS, a client certificate, a user with a password.
//!
//! Owns: an authority with the certificates of server and clients, the user. Does not own: the process (`mod`).

use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, SanType,
};

/// The user that may read and write below the prefix, and nothing else.
pub const USER: &str = "tide";
pub const PASSWORD: &str = "a password of the tests";

/// The administrator, who may do anything.
pub(super) const ROOT: (&str, &str) = ("root", "another password of the tests");

/// Makes `ca.pem`, `server.pem`, `client.pem` and their keys in `folder`. `server` is the address of the etcd.
pub(super) fn certificates(folder: &Path, server: Ipv4Addr) {
    let authority = authority("authority of an etcd");
    let write = |name: &str, text: String| fs::write(folder.join(name), text).expect("the folder of a test");
    write("ca.pem", authority.1);
    let mut params = CertificateParams::default();
    params.subject_alt_names.push(SanType::IpAddress(IpAddr::V4(server)));
    // The etcd's gateway presents this certificate to the etcd as a client.
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    let (certificate, key) = signed(params, &authority.0);
    write("server.pem", certificate);
    write("server.key", key);
    // With authentication, the gateway refuses a certificate that has a common name.
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::OrganizationName, "tidemark");
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    let (certificate, key) = signed(params, &authority.0);
    write("client.pem", certificate);
    write("client.key", key);
}

/// Writes the certificate of an authority that has signed nothing.
pub fn foreign_authority(path: &Path) {
    fs::write(path, authority("another authority").1).expect("the folder of a test");
}

fn authority(name: &str) -> (Issuer<'static, KeyPair>, String) {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let key = KeyPair::generate().expect("a key");
    let certificate = params.self_signed(&key).expect("a certificate").pem();
    (Issuer::new(params, key), certificate)
}

fn signed(params: CertificateParams, authority: &Issuer<'static, KeyPair>) -> (String, String) {
    let key = KeyPair::generate().expect("a key");
    let certificate = params.signed_by(&key, authority).expect("a certificate");
    (certificate.pem(), key.serialize_pem())
}

/// Returns the flags with which an etcd demands all of this at `url`. Port `admin`, on its host's loopback, demands nothing.
pub(super) fn flags(folder: &Path, url: &str, admin: u16) -> Vec<String> {
    let path = |name: &str| folder.join(name).display().to_string();
    let flags = [
        ("--cert-file", path("server.pem")),
        ("--key-file", path("server.key")),
        ("--trusted-ca-file", path("ca.pem")),
        ("--listen-client-urls", format!("{url},http://127.0.0.1:{admin}")),
        // The least that bcrypt allows, because no test depends on the hash's cost.
        ("--bcrypt-cost", "4".to_owned()),
    ];
    let mut flags: Vec<_> = flags.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]).collect();
    flags.push("--client-cert-auth".to_owned());
    flags
}

/// Returns a client's keys of `[etcd]`, without the endpoint and the user.
pub(super) fn keys(folder: &Path) -> [(&'static str, PathBuf); 3] {
    [("ca", "ca.pem"), ("cert", "client.pem"), ("key", "client.key")]
        .map(|(key, name)| (key, folder.join(name)))
}
