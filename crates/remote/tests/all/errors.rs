//! Servers that refuse, lie, break off and change: each a typed error, or a retry that succeeds.

use std::sync::Arc;
use std::time::Duration;

use aquifer_device::Device;
use aquifer_remote::{RemoteDevice, RemoteError};

use crate::support::{Answer, NEW, PATH, Server, pattern, quick, remote};

const LEN: usize = 100_000;

/// The error of a read while the server behaves as planned.
fn failure(server: &Server, device: &RemoteDevice, answer: Answer) -> RemoteErrorText {
    server.plan(move |_| answer.clone());
    let mut buffer = [0; 1000];
    let error = device.read_at(5000, &mut buffer).unwrap_err();
    assert_eq!(buffer, [0; 1000], "bytes of a failed read");
    let text = format!("{error} {error:?} {device:?} {:?}", device.stats());
    assert!(!text.contains("hunter2"), "{text}");
    assert!(text.contains("/dir/object.bin?…") && text.contains("5000"), "{text}");
    let found = remote(&error);
    RemoteErrorText { debug: format!("{found:?}"), text: found.to_string() }
}

struct RemoteErrorText {
    debug: String,
    text: String,
}

impl RemoteErrorText {
    #[track_caller]
    fn is(&self, variant: &str) {
        assert!(self.debug.starts_with(&format!("{variant} {{")), "{}", self.debug);
        assert!(!self.text.is_empty());
    }
}

#[test]
fn wrong_answers_are_typed_errors() {
    let server = Server::new(pattern(LEN, 1));
    let device = server.open();
    for (answer, variant) in [
        (Answer::Status(404), "NotFound"),
        (Answer::Status(403), "Denied"),
        (Answer::Status(401), "Denied"),
        (Answer::Status(412), "Changed"),
        (Answer::Status(416), "Changed"),
        (Answer::Status(400), "Unavailable"),
        (Answer::Status(503), "Unavailable"),
        (Answer::Status(302), "Unavailable"),
        (Answer::Whole, "RangesIgnored"),
        (Answer::OtherRange, "BadAnswer"),
        (Answer::NoRange, "BadAnswer"),
        (Answer::Short(1), "BadAnswer"),
        (Answer::Short(1000), "BadAnswer"),
        (Answer::Long(1), "BadAnswer"),
        (Answer::Long(5000), "BadAnswer"),
        (Answer::OtherTotal(LEN as u64 + 1), "Changed"),
        (Answer::OtherTotal(5500), "Changed"),
        (Answer::OtherTotal(1), "Changed"),
        (Answer::Cut, "Unavailable"),
        (Answer::Reset, "Unavailable"),
    ] {
        println!("{answer:?}");
        failure(&server, &device, answer).is(variant);
    }
    // The device works again.
    server.plan(|_| Answer::Proper);
    let mut buffer = [0; 1000];
    device.read_at(5000, &mut buffer).unwrap();
    assert_eq!(buffer[..], pattern(LEN, 1)[5000..6000]);
    let stats = device.stats();
    assert_eq!((stats.ranges, stats.failed_ranges, stats.delivered_bytes), (21, 20, 1000));
    assert!(stats.requests > 21 && stats.cost > 0.0, "{stats:?}");
}

/// The library collects bodies of refusals, of the length that the server announces.
#[test]
fn an_endless_refusal_is_cut() {
    let server = Server::new(pattern(LEN, 1));
    let device = server.open();
    server.reset_counts();
    for (status, variant) in [
        (404, "NotFound"),
        (403, "Denied"),
        (412, "Changed"),
        (400, "Unavailable"),
        (503, "Unavailable"),
    ] {
        failure(&server, &device, Answer::Endless(status)).is(variant);
    }
    let sent_bytes = server.counts(PATH, "GET").sent_bytes;
    // Most of it fills the buffers of sockets, seven times.
    assert!(sent_bytes < 128 << 20, "{sent_bytes}");
}

#[test]
fn a_changed_object_is_an_error_if_the_server_ignores_the_condition() {
    let server = Server::new(pattern(LEN, 1));
    let device = server.open();
    server.replace(pattern(LEN, 2), Some("\"v2\""));
    failure(&server, &device, Answer::Proper).is("Changed");
    server.ignore_if_match();
    failure(&server, &device, Answer::Proper).is("Changed");
    failure(&server, &device, Answer::Etag(None)).is("Changed");
    failure(&server, &device, Answer::Etag(Some("W/\"v1\""))).is("Changed");
    // Too short for the range, and the range cut at its end.
    for len in [4000, 5500] {
        server.replace(pattern(len, 2), Some("\"v1\""));
        failure(&server, &device, Answer::Proper).is("Changed");
    }
    // Beside a strong ETag the date does not count.
    server.replace(pattern(LEN, 1), Some("\"v1\""));
    server.date(NEW);
    device.read_at(5000, &mut [0; 1000]).unwrap();
}

#[test]
fn failures_that_pass_are_retried() {
    let server = Server::new(pattern(LEN, 1));
    let device = server.open();
    for first in [Answer::Status(503), Answer::Status(429), Answer::Reset, Answer::Cut] {
        println!("{first:?}");
        server.plan(move |number| if number == 0 { first.clone() } else { Answer::Proper });
        let mut buffer = vec![0; 40_000];
        device.read_at(5000, &mut buffer).unwrap();
        assert!(buffer == pattern(LEN, 1)[5000..45_000]);
        assert_eq!(server.asked().len(), 2);
    }
}

/// A server that asks for more time than there is gets no second request; one that asks for none gets it.
#[test]
fn a_busy_server_is_given_the_time_that_it_asks_for() {
    let server = Server::new(pattern(LEN, 1));
    let open = |retries| {
        server.plan(|_| Answer::Proper);
        quick().timeout(Duration::from_secs(2)).retries(retries).open(&server.url())
    };
    let device = loop {
        match open(1000) {
            Err(RemoteError::TimedOut { .. }) => {}
            opened => break opened.unwrap(),
        }
    };
    for (status, after) in
        [(503, "1000"), (429, "18446744073709551615"), (503, "Fri, 31 Dec 9999 23:59:59 GMT")]
    {
        failure(&server, &device, Answer::RetryAfter(status, after.into())).is("TimedOut");
        // None, if the machine was too busy to send it.
        assert!(server.asked().len() <= 1, "{after}");
    }
    // Another status means no wait, nor does what cannot be understood, or is over.
    server.plan(|_| Answer::Proper);
    let device = server.open();
    for (status, after) in [
        (500, "1000"),
        (503, "Wed, 21 Oct 2015 07:28:00 GMT"),
        (503, "soon"),
        (429, "-1"),
        (503, ""),
    ] {
        server.plan(move |number| match number {
            0 => Answer::RetryAfter(status, after.into()),
            _ => Answer::Proper,
        });
        device.read_at(5000, &mut [0; 1000]).unwrap();
        assert_eq!(server.asked().len(), 2, "{after}");
    }
    // After the last retry there is nothing to wait for.
    server.plan(|number| match number {
        0 => Answer::Proper,
        _ => Answer::RetryAfter(503, "1000".into()),
    });
    let device = quick().retries(0).open(&server.url()).unwrap();
    let error = device.read_at(5000, &mut [0; 1000]).unwrap_err();
    assert!(matches!(remote(&error), RemoteError::Unavailable { .. }), "{error}");
}

/// What signs a request is for one server: another one is not asked, and learns no query.
#[test]
fn redirects_are_followed_within_a_server_only() {
    let (server, other) = (Server::new(pattern(LEN, 1)), Server::new(pattern(LEN, 1)));
    let s3 = server.s3().config("aws_session_token", "hunter2");
    for device in [server.open(), s3.open("s3://bucket/dir/object.bin").unwrap()] {
        let to = other.url();
        server.plan(move |_| Answer::Redirect(to.clone()));
        let error = device.read_at(5000, &mut [0; 1000]).unwrap_err();
        let found = remote(&error);
        assert!(matches!(found, RemoteError::Unavailable { status: Some(302), .. }), "{found:?}");
        let text = format!("{error} {error:?}");
        assert!(text.contains("redirects") && !text.contains("hunter2"), "{text}");
        assert!(other.asked().is_empty(), "{:?}", other.asked());

        let to = server.url();
        server.plan(move |number| match number {
            0 => Answer::Redirect(to.clone()),
            _ => Answer::Proper,
        });
        let mut buffer = [0; 1000];
        device.read_at(5000, &mut buffer).unwrap();
        assert_eq!(buffer[..], pattern(LEN, 1)[5000..6000]);
        assert!(server.asked().iter().all(|asked| !asked.head.contains("referer")));
        server.plan(|_| Answer::Proper);
    }
}

/// As of a CDN: without a query there is nothing that another server may not see.
#[test]
fn plain_urls_are_redirected_to_other_servers() {
    let bytes = pattern(LEN, 1);
    let (server, other) = (Server::new(bytes.clone()), Server::new(bytes.clone()));
    let plain = |server: &Server| format!("{}/{PATH}", server.endpoint());
    // A signature of the other server's own is its own affair.
    let to = other.url();
    server.plan(move |_| Answer::Redirect(to.clone()));
    let device = quick().open(&plain(&server)).unwrap();
    let mut buffer = [0; 1000];
    device.read_at(5000, &mut buffer).unwrap();
    assert_eq!(buffer[..], bytes[5000..6000]);
    let heads: Vec<_> = other.asked().iter().map(|asked| asked.head.clone()).collect();
    assert_eq!((heads.len(), server.asked().len()), (2, 2));
    assert!(heads[1].contains("if-match: \"v1\"") && heads[1].contains("range: bytes=5000-5999"));
    assert!(heads.iter().all(|head| !head.contains("referer")), "{heads:?}");
    assert_eq!(device.stats().requests, 4);
    let fails = |error: &RemoteError| {
        let is_redirect = matches!(error, RemoteError::Unavailable { status: Some(302), .. });
        assert!(is_redirect && error.to_string().contains("redirects"), "{error}");
        assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
    };

    // The version is that of what the other server has.
    other.ignore_if_match();
    other.replace(pattern(LEN, 2), Some("\"v2\""));
    let error = device.read_at(7000, &mut buffer).unwrap_err();
    assert!(matches!(remote(&error), RemoteError::Changed { .. }), "{error}");
    assert_eq!(buffer[..], bytes[5000..6000]);

    // What may be a secret stays here.
    other.plan(|_| Answer::Proper);
    fails(&quick().open(&server.url()).unwrap_err());
    fails(&quick().config("User_Agent", "hunter2").open(&plain(&server)).unwrap_err());
    assert!(other.asked().is_empty(), "{:?}", other.asked());

    // Two servers that redirect to each other.
    let to = plain(&server);
    other.plan(move |_| Answer::Redirect(to.clone()));
    let to = plain(&other);
    server.plan(move |_| Answer::Redirect(to.clone()));
    fails(&quick().open(&plain(&server)).unwrap_err());
    let asked = server.asked().len() + other.asked().len();
    assert_eq!(asked, 11);
}

/// A body that broke off is continued only with the same version.
#[test]
fn a_retry_never_continues_another_version() {
    for honours in [true, false] {
        let server = Server::new(vec![1; LEN]);
        if !honours {
            server.ignore_if_match();
        }
        let device = server.open();
        server.plan(|number| match number {
            0 => Answer::Cut,
            _ => Answer::Etag(Some("\"v2\"")),
        });
        let mut buffer = vec![0; 40_000];
        let error = device.read_at(0, &mut buffer).unwrap_err();
        assert!(matches!(remote(&error), RemoteError::Changed { .. }), "{error}");
        assert!(buffer.iter().all(|&byte| byte == 0));
    }
}

/// Also if the change shows only in length or date.
#[test]
fn a_retry_with_another_length_or_date_is_another_version() {
    let fails = |server: &Server, device: &RemoteDevice| {
        let error = device.read_at(0, &mut [0; 40_000]).unwrap_err();
        assert!(matches!(remote(&error), RemoteError::Changed { .. }), "{error}");
        assert_eq!(server.asked().len(), 2);
    };
    let server = Arc::new(Server::new(vec![1; LEN]));
    let device = server.open();
    server.plan(|number| match number {
        0 => Answer::Cut,
        _ => Answer::OtherTotal(LEN as u64 + 1),
    });
    fails(&server, &device);

    server.replace(vec![1; LEN], Some("W/\"v1\""));
    server.plan(|_| Answer::Proper);
    let device = quick().unversioned(true).open(&server.url()).unwrap();
    let changing = Arc::downgrade(&server);
    server.plan(move |number| {
        if number == 0 {
            return Answer::Cut;
        }
        changing.upgrade().expect("it answers").date(NEW);
        Answer::Proper
    });
    fails(&server, &device);
}

#[test]
fn a_silent_server_is_given_up() {
    let server = Server::new(pattern(LEN, 1));
    let open = || quick().timeout(Duration::from_millis(500)).retries(1000).open(&server.url());
    // On a busy machine opening may take that long as well.
    let device = loop {
        match open() {
            Err(RemoteError::TimedOut { .. }) => {}
            opened => break opened.unwrap(),
        }
    };
    failure(&server, &device, Answer::Silence).is("TimedOut");
    failure(&server, &device, Answer::Status(503)).is("TimedOut");
    let stats = device.stats();
    assert_eq!((stats.ranges, stats.failed_ranges), (2, 2));
    server.plan(|_| Answer::Silence);
    let error = open().unwrap_err();
    assert!(matches!(error, RemoteError::TimedOut { .. }), "{error}");
    assert!(!format!("{error} {error:?}").contains("hunter2"));
}

#[test]
fn objects_without_a_version_are_refused_unless_allowed() {
    for etag in [None, Some("W/\"weak\""), Some("\"\"")] {
        let server = Server::new(pattern(LEN, 1));
        server.replace(pattern(LEN, 1), etag);
        let error = quick().open(&server.url()).unwrap_err();
        assert!(matches!(error, RemoteError::Unversioned { .. }), "{error}");
        let device = quick().unversioned(true).open(&server.url()).unwrap();
        let mut buffer = [0; 1000];
        device.read_at(5000, &mut buffer).unwrap();
        assert_eq!(buffer[..], pattern(LEN, 1)[5000..6000]);
        // A change that shows is found.
        server.replace(pattern(LEN + 1, 1), etag);
        failure(&server, &device, Answer::Proper).is("Changed");
        server.replace(pattern(LEN, 1), Some("W/\"other\""));
        failure(&server, &device, Answer::Proper).is("Changed");
        server.replace(pattern(LEN, 1), etag);
        server.date(NEW);
        failure(&server, &device, Answer::Proper).is("Changed");
    }
}

#[test]
fn opening_fails_with_the_same_errors() {
    for (answer, variant) in [
        (Answer::Status(404), "NotFound"),
        (Answer::Status(403), "Denied"),
        (Answer::Status(500), "Unavailable"),
        (Answer::Whole, "RangesIgnored"),
        (Answer::NoRange, "BadAnswer"),
        (Answer::OtherRange, "BadAnswer"),
        (Answer::Reset, "Unavailable"),
    ] {
        println!("{answer:?}");
        let server = Server::new(pattern(LEN, 1));
        server.plan(move |_| answer.clone());
        for result in [quick().open(&server.url()), server.s3().open("s3://bucket/dir/object.bin")]
        {
            let error = result.unwrap_err();
            let text = format!("{error} {error:?}");
            assert!(format!("{error:?}").starts_with(variant), "{text}");
            assert!(!text.contains("hunter2") && text.contains("/dir/object.bin"), "{text}");
        }
    }
    // A port without a server: bound, and closed again.
    let closed = Server::new(vec![0; 10]).url();
    let error = quick().open(&closed).unwrap_err();
    assert!(matches!(error, RemoteError::Unavailable { status: None, .. }), "{error}");
    assert!(!format!("{error} {error:?}").contains("hunter2"));
}

#[test]
fn options_show_no_secrets() {
    let server = Server::new(vec![0; 10]);
    let options = server.s3().endpoint("http://user:hunter2@127.0.0.1:1");
    assert!(!format!("{options:?}").contains("hunter2"), "{options:?}");
}
