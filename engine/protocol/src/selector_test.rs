//! The grammar of CHECKPOINT and of places on the mount, by example and by property.

use super::*;
use proptest::prelude::*;

fn place(text: &str) -> Place {
    Place::relative(text.as_bytes()).unwrap()
}

#[test]
fn each_form_of_checkpoint_is_told_apart() {
    let cases: [(&[u8], Typed<'_>); 12] = [
        (b"latest", Typed::Latest),
        (b"@latest", Typed::Latest),
        (b"run7@latest", Typed::LatestOf(b"run7")),
        (b"@1200", Typed::Step(1200)),
        (b"run7@1200", Typed::StepOf(b"run7", 1200)),
        (b"a/b@c@7", Typed::StepOf(b"a/b@c", 7)),
        (b"/ckpt/run7@1200", Typed::StepOf(b"/ckpt/run7", 1200)),
        (b"./latest", Typed::At(b"./latest")),
        (b"./run7@1200", Typed::At(b"./run7@1200")),
        (b"run7/step-1200", Typed::At(b"run7/step-1200")),
        (b"me@home/x", Typed::At(b"me@home/x")),
        (b"run\xff@3", Typed::StepOf(b"run\xff", 3)),
    ];
    for (text, typed) in cases {
        assert_eq!(Typed::parse(text), Ok(typed), "{}", String::from_utf8_lossy(text));
    }
    assert_eq!(Typed::parse(b""), Err(SelectorError::Empty));
    assert!(matches!(Typed::parse(b"@99999999999999999999"), Err(SelectorError::StepTooLarge { .. })));
}

#[test]
fn typed_paths_land_on_the_mount_or_are_refused() {
    let typed = |cwd: &str, path: &str| Place::typed(b"/ckpt", cwd.as_bytes(), path.as_bytes());
    for (cwd, path, expected) in [
        ("/root", "/ckpt/run7/a", "run7/a"),
        ("/root", "/ckpt", ""),
        ("/root", "/ckpt/", ""),
        ("/root", "../ckpt/run7//a/.", "run7/a"),
        ("/ckpt/run7", "a", "run7/a"),
        ("/ckpt/run7", "../run8", "run8"),
        ("/ckpt", ".", ""),
    ] {
        assert_eq!(typed(cwd, path), Ok(place(expected)), "{cwd} {path}");
    }
    for (cwd, path) in [
        ("/root", "/ckptx/a"),
        ("/root", "/etc"),
        ("/root", "run7"),
        ("/root", "../x"),
        ("/ckpt/run7", "../../x"),
    ] {
        assert!(matches!(typed(cwd, path), Err(PlaceError::Outside { .. })), "{cwd} {path}");
    }
}

#[test]
fn a_mount_on_the_root_holds_every_path() {
    assert_eq!(Place::typed(b"/", b"/root", b"/a/b"), Ok(place("a/b")));
}

#[test]
fn places_on_the_wire_cannot_lead_out_of_the_mount() {
    for bad in [r#""/etc""#, r#""..""#, r#""a/../../b""#, r#""a\u0000b""#, "[46,46]", "[300]"] {
        assert!(serde_json::from_str::<Place>(bad).is_err(), "{bad}");
    }
    let long = format!("\"{}\"", "x".repeat(PATH_BYTES_MAX + 1));
    assert!(serde_json::from_str::<Place>(&long).is_err());
}

proptest! {
    #[test]
    fn every_place_survives_the_wire(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
        if let Ok(place) = Place::relative(&bytes) {
            let text = serde_json::to_string(&place).unwrap();
            prop_assert_eq!(serde_json::from_str::<Place>(&text).unwrap(), place.clone());
            prop_assert!(!place.as_bytes().starts_with(b"/"));
            prop_assert!(place.as_bytes().split(|b| *b == b'/').all(|name| name != b".."));
        }
    }

    #[test]
    fn no_text_panics(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
        let _ = Typed::parse(&bytes);
        let _ = Place::typed(b"/ckpt", b"/ckpt/x", &bytes);
    }
}

#[test]
fn a_version_is_two_numbers() {
    let number: VersionNumber = "0.12".parse().unwrap();
    assert_eq!((number.timeline, number.version), (Timeline(0), Version(12)));
    assert_eq!(serde_json::to_string(&number).unwrap(), r#""0.12""#);
    assert_eq!(serde_json::from_str::<VersionNumber>(r#""0.12""#).unwrap(), number);
    for none in ["", "1", "0.", ".1", "0.+1", "0.1.2", "v0.1", "0.99999999999999999999"] {
        assert!(none.parse::<VersionNumber>().is_err(), "{none}");
    }
}
